"""Nodes of a Ray cluster, closed to strangers: python -m a3c_mp.cluster head | join HOST:PORT | status

head starts the first node, and makes a token; join adds a node of another machine, which needs a copy of the token
file; both run until Ctrl-C. status lists the nodes. Then: python train_ray.py --address auto
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from a3c_mp.cluster.access import (
    KEY_NAMESPACE,
    LAST_PORT,
    VERSIONS_KEY,
    check_cluster,
    find_cluster,
    has_live_address,
    make_token,
    saved_address,
)
from a3c_mp.cluster.environment import LOCAL_HOSTS, ClusterAddress, check_installed, environment, foreign, versions
from a3c_mp.cluster.guardian import Guardian, command_line, descendants, end_processes, has_open, parents, remove_folder
from a3c_mp.cluster.session import FOLDER_PREFIX, TEMP_FOLDER
from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.processes.spawn import SIGNALS

START_SECONDS = 60.0
POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
GRACE_SECONDS = 20.0
"""time from a signal, or the failure of a main process, to the end of the others, in which runs save their state"""
SERVERS = {"gcs_server", "raylet"}
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
PORT = 6399
# `ray start`. With `LOOPBACK` set it refuses to join a cluster, which is meant for Windows; here it is only for tests.
RAY = """
import types
from ray.scripts import scripts
scripts.ray_constants = types.SimpleNamespace(**{**vars(scripts.ray_constants), "ENABLE_RAY_CLUSTER": True})
scripts.main()
"""


def main() -> int:
    args = parse()
    try:
        check_installed()
        return {"head": head, "join": join, "status": status}[args.command](args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m a3c_mp.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("head", "join", "status"):
        command = commands.add_parser(name)
        command.add_argument("--token-file", type=Path, help="the cluster's secret; default: ray_token in ~/.a3c_mp")
        if name == "join":
            command.add_argument("address", help="HOST:PORT of the head")
        if name == "status":
            command.add_argument("address", nargs="?", default="auto", help="HOST:PORT of the head, or auto")
        else:
            command.add_argument("--num-cpus", type=int, help="places for actors; default: the cores of this machine")
            command.add_argument("--host", help="address of this machine for other nodes; default: loopback only")
        if name == "head":
            command.add_argument("--port", type=int, default=PORT)
    return parser.parse_args()


def head(args: argparse.Namespace) -> int:
    """Run the first node of a cluster, until a signal."""
    if not 0 < args.port <= LAST_PORT:
        raise ConfigError("port", args.port, f"must be between 1 and {LAST_PORT}", "choose another")
    token = str(make_token(args.token_file))
    host = args.host or LOCAL_HOSTS[0]
    address = f"{host}:{args.port}"
    try:
        socket.create_server((host, args.port)).close()
    except OSError as error:
        why = f"it cannot be bound ({error.strerror!s})"
        raise ConfigError("port", address, why, "choose another --port, or --host") from error
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        options = ["--head", f"--port={args.port}", f"--temp-dir={folder / TEMP_FOLDER}", "--include-dashboard=false"]
        with Node(options, host, args.num_cpus, environment(address, token), folder) as node:
            _publish_versions(address, node)
            with saved_address(ClusterAddress(address, token)):
                print(f"head of a cluster at {address}; its token is in {token}", flush=True)
                print(f"on other machines: python -m a3c_mp.cluster join {address} --token-file FILE", flush=True)
                return node.wait()
    finally:
        remove_folder(folder)


def join(args: argparse.Namespace) -> int:
    """Run a node that joins a cluster, until a signal or until the head ends."""
    if args.address == "auto":
        raise ConfigError("address", "auto", "must be HOST:PORT of the head", "see python -m a3c_mp.cluster status")
    found = find_cluster(args.address, args.token_file)
    check_cluster(found)
    host = args.host or _own_address(args.address)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        options = [f"--address={args.address}", f"--temp-dir={folder / TEMP_FOLDER}"]
        settings = environment(args.address, found.token_file)
        with Node(options, host, args.num_cpus, settings, folder) as node, ExitStack() as stack:
            if not has_live_address():
                stack.enter_context(saved_address(found))
            print(f"joined the cluster at {args.address} as {host}", flush=True)
            return node.wait()
    finally:
        remove_folder(folder)


def status(args: argparse.Namespace) -> int:
    """Print the nodes of a cluster, and how many places for actors are free."""
    found = find_cluster(args.address, args.token_file)
    answer = check_cluster(found)
    print(f"{found.address}: {len(answer.nodes)} nodes, {answer.free_cpus:g} places for actors free")
    for node in answer.nodes:
        print(f"  {node['address']}  {node['cpus']:g} places")
    return 0


class Node:
    """The processes of a Ray node; in a `with` block.

    They become children of this process, which ends them; where it is killed, a guardian does.

    Args:
        options: of `ray start`.
        host: address of this machine.
        num_cpus: places for actors; None for the number of cores.
        settings: environment variables.
        folder: that holds the node's files.
    """

    def __init__(self, options: list[str], host: str, num_cpus: int | None, settings: dict[str, str], folder: Path):
        command = [sys.executable, "-c", RAY, "start", *options]
        command += [f"--node-ip-address={host}", "--disable-usage-stats"]
        command += [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))  # where actors find this code
        self._command, self._settings = command, {**foreign(os.environ), **settings, "PYTHONPATH": path}
        self._folder, self._stopped = folder, False
        self._servers: list[int] = []  # its main processes

    def __enter__(self) -> Node:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)
        self._guardian = Guardian(self._folder)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def wait(self) -> int:
        """Wait for a signal (then return 0), or for the end of one of the node's main processes (1).

        Runs on this node have time to save their state: where its raylet ends, Ray ends them at once.
        """
        while not self._stopped:
            if not all(map(command_line, self._servers)):
                print(f"the node has failed; it ends in {GRACE_SECONDS:.0f} s", file=sys.stderr, flush=True)
                self._pause(GRACE_SECONDS)  # a run saves its state meanwhile
                return 1
            self._pause(POLL_SECONDS)
        self._let_runs_end()
        return 0

    def _let_runs_end(self) -> None:
        """Wait until no trainer uses this node, for `GRACE_SECONDS` at most, or until another signal."""
        self._stopped, deadline = False, time.monotonic() + GRACE_SECONDS
        if self._is_used():
            text = f"a run uses this node: stop it; the node ends in {GRACE_SECONDS:.0f} s, or at a second signal"
            print(text, file=sys.stderr, flush=True)
        while self._is_used() and time.monotonic() < deadline and not self._stopped:
            self._pause(POLL_SECONDS)

    def _is_used(self) -> bool:
        """Whether a process that is not of this node has a log file of it open, as a trainer has."""
        own = {os.getpid(), *self._family()}
        return any(has_open(pid, self._folder) for pid in parents() if pid not in own)

    def _start(self) -> None:
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                self._command, env=self._settings, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + START_SECONDS
            while process.poll() is None and time.monotonic() < deadline and not self._stopped:
                self._pause(POLL_SECONDS)
            if self._stopped:
                raise Stopped(0)  # as `wait` ends
            if process.poll() != 0:
                why = " ".join(_read(output).split())[-300:]
                raise ConfigError("node", "", f"Ray cannot be started here ({why})", "see docs/ray.md")
        family = self._family()
        self._servers = [pid for pid in family if SERVERS & set(command_line(pid).split(" ")[0].split("/")[-1:])]
        self._guardian.watch(family)

    def _family(self) -> list[int]:
        own = {os.getpid(), self._guardian.pid}
        return [pid for pid in descendants([os.getpid()]) if pid not in own]

    def _end(self) -> None:
        end_processes(self._family())
        self._guardian.close()

    def _pause(self, seconds: float) -> None:
        """Sleep, unless a signal has arrived; collect the exit codes of what has ended."""
        deadline = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, seconds))
            for pid in self._servers:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _on_signal(self, signum: int, frame: object) -> None:
        self._stopped = True


def _read(file) -> str:
    file.seek(0)
    return file.read()


def _publish_versions(address: str, node: Node) -> None:
    """Leave the versions of this machine with the head, for those that join."""
    os.environ.update({name: value for name, value in node._settings.items() if name.startswith("RAY_")})
    from ray import _raylet

    value = json.dumps(dict(versions())).encode()
    client: Any = _raylet
    client.GcsClient(address=address).internal_kv_put(VERSIONS_KEY, value, True, KEY_NAMESPACE)


def _own_address(address: str) -> str:
    """The address of this machine on the way to another one."""
    host, _, port = address.rpartition(":")
    if host in LOCAL_HOSTS:
        return LOCAL_HOSTS[0]
    with socket.create_connection((host, int(port)), CONNECT_SECONDS) as connection:
        return str(connection.getsockname()[0])


if __name__ == "__main__":
    sys.exit(main())
