"""A node of Ray on this machine: its processes and files, which end with the process that has started it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from a3c_mp.cluster import guardian
from a3c_mp.cluster.environment import foreign, versions
from a3c_mp.errors import ConfigError

START_SECONDS, END_SECONDS = 60.0, 5.0
FOLDER_PREFIX = "a3c-ray-"
# `ray start`. With `LOOPBACK` set it refuses to join a cluster, which is meant for Windows; here it is only for tests.
RAY_START = """
import types
from ray.scripts import scripts
scripts.ray_constants = types.SimpleNamespace(**{**vars(scripts.ray_constants), "ENABLE_RAY_CLUSTER": True})
scripts.main()
"""


def make_folder() -> Path:
    """Make the folder of a node, with mode 0700; Ray opens the one that it makes below it to everybody."""
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))


class Node:
    """The processes of a Ray node, from construction on, and their folder: both are gone after `close`.

    Args:
        folder: from `make_folder`.
        options: of `ray start`.
        settings: environment variables.
    """

    def __init__(self, folder: Path, options: list[str], settings: Mapping[str, str]):
        self.folder = folder
        command = [sys.executable, "-c", RAY_START, "start", f"--temp-dir={folder / 'ray'}", "--disable-usage-stats"]
        labels = ",".join(f"{name}={version}" for name, version in versions().items())
        command += [f"--labels={labels}", *options]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))  # where actors find this code
        # A pipe of plain numbers: closed by `close` or by the end of this process, never by the garbage collector.
        stdin, self._pipe = os.pipe()
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(folder), *command], stdin=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
            env={**foreign(os.environ), **settings, "PYTHONPATH": path},
        )  # fmt: skip
        os.close(stdin)
        assert self._guardian.stdout is not None
        self._output = self._guardian.stdout

    def wait_for_start(self) -> str:
        """Wait until the node runs; returns HOST:PORT of its cluster's head. Raises ConfigError if it cannot start."""
        if not select.select([self._output], [], [], START_SECONDS)[0] or self._output.readline() != b"0\n":
            why = " ".join((self.folder / guardian.LOG).read_text(errors="replace").split())[-300:]
            raise ConfigError("node", "", f"Ray cannot be started here ({why})", "see docs/ray.md")
        return (self.folder / "ray" / "ray_current_cluster").read_text()

    def wait_for_end(self) -> None:
        """Wait until one of the node's main processes has ended."""
        select.select([self._output], [], [])

    def is_used(self) -> bool:
        """Whether a process that is not of the node has a log file of it open, as a trainer has."""
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                is_ours = os.readlink(link).startswith(f"{self.folder}/")
                if is_ours and os.getsid(int(link.parts[2])) != self._guardian.pid:
                    return True
        return False

    def close(self) -> None:
        """Kill the node's processes and remove its folder."""
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):
            self._guardian.wait(END_SECONDS)
