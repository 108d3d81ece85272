"""Ray on this machine: its version, the environment variables of its processes, and the processes of a node."""

import importlib.metadata
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from a3c_mp._bootstrap import CHAPTERS
from a3c_mp.cluster import guardian
from a3c_mp.errors import STARTED_IN, ConfigError, start_here
from a3c_mp.processes.program import describe_program
from a3c_mp.processes.slots import MIB, free_memory
from a3c_mp.processes.spawn import root_for_sockets

RAY_VERSION = "2.60.0"
FIRST_WITH_TOKENS = 2, 52
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # where it is over, Ray exits the process, without `finally`
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # a wrong token is refused after 1 s instead of 20 s
    "RAY_health_check_period_ms": "1000",  # of nodes by the head: one that is gone refuses at once, a busy one has 10 s
    "RAY_health_check_failure_threshold": "2",
    "RAY_LOG_MONITOR_MAX_OPEN_FILES": "10",  # its log monitor keeps two files of each process that was killed open
    "RAY_AUTH_MODE": "token",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",  # 3.11.4 joins 3.11.9
}
"""environment variables that Ray reads when it is imported, and that its processes inherit"""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""keeps all of Ray on 127.0.0.1 (so it does on Windows and macOS); also read at the import"""
LOOPBACK_HOST = "127.0.0.1"
# `ray start`, without the server of Ray Client, on port 10001, and also where `LOOPBACK` lets it join no cluster.
RAY_START = """
import types
from ray.scripts import scripts
scripts.ray_constants = types.SimpleNamespace(**{**vars(scripts.ray_constants), "ENABLE_RAY_CLUSTER": True})
scripts.get_ray_client_dependency_error = lambda: "not used"
scripts.main()
"""
START_SECONDS, END_SECONDS = 60.0, 5.0
LEAST_STORE, LARGEST_STORE = 75 * MIB, 200 * 10**9  # of Ray: below the first it does not start, the second is its limit
FOLDER_PREFIX = "a3c-ray-"
SOCKET = f"/{FOLDER_PREFIX}12345678/ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
MAX_ROOT = 107 - len(SOCKET)  # bytes of the folder in which a node has its own


class ClusterAddress(NamedTuple):
    """Where a running cluster is, and the file of its token."""

    address: str  # HOST:PORT of its head
    token_file: str  # "": it has no token


def check_installed() -> None:
    """Raise ConfigError if ray is not installed, or has no tokens."""
    fix = f'pip install "ray=={RAY_VERSION}"'
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "none", "it is not installed", fix)
    version = importlib.metadata.version("ray")
    if tuple(map(int, version.split(".")[:2])) < FIRST_WITH_TOKENS:
        raise ConfigError("ray", version, "clusters of this version have no tokens", fix)


def labels() -> dict[str, str]:
    """What a node tells others of its program, in letters that Ray allows."""
    return {name: value.replace("+", "-changed") for name, value in describe_program().items()}


def environment(cluster: ClusterAddress) -> dict[str, str]:
    """Variables of a process that starts or joins a cluster."""
    local = LOOPBACK if cluster.address.rpartition(":")[0] in (LOOPBACK_HOST, "localhost") else {}
    token = {"RAY_AUTH_TOKEN_PATH": cluster.token_file} if cluster.token_file else {"RAY_AUTH_MODE": "disabled"}
    return {**ENVIRONMENT, **local, **token}


def foreign(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those that Ray reads, except the ones of its TLS, which are the user's choice."""
    kept = "RAY_USE_TLS", "RAY_TLS_"
    return {name: value for name, value in variables.items() if not name.startswith("RAY_") or name.startswith(kept)}


def store_folder() -> str:
    """Where the object store of a node lies: in shared memory, or in a temporary folder where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else root_for_sockets(MAX_ROOT)


class Node:
    """The processes of a Ray node, from construction on, and their folder: both are gone after `close`.

    `options` are those of `ray start`, `settings` environment variables. Raises ConfigError if it cannot be started.
    """

    def __init__(self, options: list[str], settings: Mapping[str, str]):
        start = STARTED_IN[0] if STARTED_IN else start_here()  # an environment may have left it
        places = str(start), os.environ.get("PYTHONPATH"), str(CHAPTERS)  # where actors find this code
        root, store = root_for_sockets(MAX_ROOT), store_folder()
        if not any(option.startswith("--object-store-memory") for option in options):
            free = shutil.disk_usage(store).free  # Ray would not look at a folder that is given
            size = min(3 * free_memory() // 10, free // 2 if store == root else 9 * free // 10, LARGEST_STORE)
            if size < LEAST_STORE:
                why = f"Ray's object store needs {LEAST_STORE // MIB} MiB; {free // MIB:,} MiB is free there"
                why += f", and {free_memory() // MIB:,} MiB of memory, of which Ray takes 30%"
                raise ConfigError("node", store, why, "make room, or enlarge it (docker run --shm-size)")
            options = [*options, f"--object-store-memory={size}"]
        try:
            self.folder = folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root))  # 0700, unlike Ray's in it
        except OSError as error:
            fix = "make room there, or let TMPDIR name another"
            raise ConfigError("node", root, f"no folder can be made there ({error.strerror})", fix) from error
        options = [*options, f"--plasma-directory={store}"]
        own = ",".join(f"{name}={value}" for name, value in labels().items())
        command = [sys.executable, "-c", RAY_START, "start", f"--temp-dir={folder / 'ray'}", "--disable-usage-stats"]
        # A pipe of plain numbers: closed by `close` or by the end of this process, never by the garbage collector.
        stdin, self._pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, folder, *command, f"--labels={own}", *options],
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
                env={**foreign(os.environ), **settings, "PYTHONPATH": os.pathsep.join(filter(None, places))},
            )  # fmt: skip
        except OSError as error:
            os.close(self._pipe)
            folder.rmdir()
            fix = "raise the limit on processes (ulimit -u), or free memory"
            raise ConfigError("node", "", f"Ray cannot be started here ({error.strerror})", fix) from error
        finally:
            os.close(stdin)
        self._output: Any = self._guardian.stdout

    def wait_for_start(self) -> str:
        """Wait until the node runs; returns HOST:PORT of its cluster's head. Raises ConfigError if it cannot start."""
        has_answered = select.select([self._output], [], [], START_SECONDS)[0]
        if not has_answered or self._output.readline() != b"0\n":
            why = "its guardian was killed" if has_answered else f"not within {START_SECONDS:.0f} s"
            with suppress(OSError):
                why = " ".join((self.folder / guardian.LOG).read_text(errors="replace").split())[-300:] or why
            raise ConfigError("node", "", f"Ray cannot be started here ({why})", "see docs/ray.md")
        return (self.folder / "ray" / "ray_current_cluster").read_text()

    def has_ended(self, seconds: float) -> bool:
        """Wait for the end of a main process of the node, for at most `seconds`; returns whether one has ended."""
        return bool(select.select([self._output], [], [], seconds)[0])

    def is_used(self) -> bool:
        """Whether a process that is not of the node has a log file of it open, as a trainer has."""
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                is_ours = os.readlink(link).startswith(f"{self.folder}/")
                if is_ours and os.getsid(int(link.parts[2])) != self._guardian.pid:
                    return True
        return False

    def was_given_up(self) -> bool:
        """Whether the node has ended because the head could not reach it."""
        with suppress(OSError):
            log = (self.folder / "ray/session_latest/logs/raylet.out").read_text(errors="replace")
            return "marked as dead by the GCS" in log
        return False

    def close(self) -> None:
        """Kill the node's processes and remove its folder."""
        os.close(self._pipe)
        with suppress(subprocess.TimeoutExpired):
            self._guardian.wait(END_SECONDS)
        if self.folder.exists():  # the guardian was killed, or is stopped
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if os.getsid(pid := int(path.name)) == self._guardian.pid:
                        os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._guardian.wait(END_SECONDS)
            shutil.rmtree(self.folder, ignore_errors=True)
