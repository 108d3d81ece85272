"""Ranks: processes that `accelerate launch` or torchrun starts, each with a share of the members.

They exchange bytes by gloo, over the loopback interface on one machine and over that towards rank 0 on several. What
they receive cannot run code. The launcher's own store, through which they find each other, is torch's and listens
on all interfaces.
"""

import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from a3c_mp._bootstrap import end_with_parent
from a3c_mp.config import PLACE
from a3c_mp.errors import ConfigError, PeerLost, TrainingError
from a3c_mp.population.settings import Args
from a3c_mp.processes.interfaces import LOOPBACK, interface_towards
from a3c_mp.processes.learner_group import LearnerGroup, losing_peers
from a3c_mp.processes.learners import GLOO_SECONDS
from a3c_mp.processes.program import MUST_AGREE, describe_program, differences

RANK_SECONDS = 86_400.0
"""longest time that a rank waits for another, which may be slower, or play games that confirm a fitness; one that ends,
or whose machine does not answer, is noticed at once"""
LOST_SECONDS = 10  # until a machine that does not answer, or whose ranks do not read what is sent to them, is lost
SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.05  # between two looks at an operation, s
PATIENCE_SECONDS = 1.0  # time for another rank's answer after a signal
REPORT_SECONDS = 3.0  # time that a rank waits for the others before it reports that
REFUSAL_SECONDS = 20.0  # longest time that rank 0 may take longer than others to find the same bad input


class Interrupted(PeerLost):
    """A signal has come while this rank waited for another one."""


class Ranks(LearnerGroup):
    """The ranks of a population. `check` notices the end of another one while this one waits for its members.

    While it waits for another rank's data, that raises PeerLost too, and `is_interrupted()` before long Interrupted.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        super().__init__(rank, size)
        self._connections = select.poll()
        self.is_interrupted: Callable[[], bool] = lambda: False

    def watch(self, before: Collection[str]) -> None:
        """Watch the connections to other ranks, not those to the launcher's store or open `before` (/proc/self/fd)."""
        for name in {*os.listdir("/proc/self/fd")}.difference(before):
            with suppress(OSError, IndexError):  # it is no connection, or a Unix socket
                connection = socket.socket(fileno=int(name))
                try:
                    ports = {connection.getsockname()[1], connection.getpeername()[1]}
                    if int(os.environ["MASTER_PORT"]) not in ports:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)
                        self._connections.register(connection.fileno(), select.POLLRDHUP)
                finally:
                    connection.detach()  # it stays open

    def check(self) -> None:
        """Raise PeerLost if another rank has ended, or its machine does not answer."""
        if self._connections.poll(0):
            raise PeerLost("another rank has ended or its machine does not answer")

    def _wait(self, work: Any) -> None:
        # By short waits: in torch's own, Python runs no signal handler.
        seconds, begin, lost = SHORTEST_WAIT, time.monotonic(), math.inf
        while not work.is_completed():
            now = time.monotonic()
            lost = min(lost, now if self._connections.poll(0) else math.inf)
            if now - lost > GLOO_SECONDS:  # what has arrived from a rank that has ended is read by then
                self.check()
            if now - begin > PATIENCE_SECONDS and self.is_interrupted():  # a rank that is as far has answered by then
                raise Interrupted("interrupted while it waited for another rank")
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT)
        work.wait()


def join(args: Args) -> Ranks:
    """Connect to the other ranks, if a launcher has started several; raises ConfigError and PeerLost."""
    rank, size = read_ranks(os.environ)
    if size == 1:
        return Ranks()
    if size > args.population:
        why = f"each of {size} ranks needs at least one"
        raise ConfigError("population", args.population, why, "raise it, or start fewer processes")
    os.environ["GLOO_SOCKET_IFNAME"] = find_interface(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGTERM)  # the launcher, which may be killed
    before = os.listdir("/proc/self/fd")
    _find_others(rank, size, args.hang_seconds)
    group = Ranks(rank, size)
    settings = {name: repr(value) for name, value in vars(args).items() if name not in PLACE}
    own = json.dumps(settings | describe_program()).encode()
    first, *others = map(json.loads, group.all_gather_bytes(own))
    for number, theirs in enumerate(others, 1):
        if differing := differences(theirs, first, MUST_AGREE | dict.fromkeys(settings, sys.maxsize))[0]:
            fix = "start all ranks with the same flags and versions; on one machine by one command"
            raise ConfigError("RANK", number, f"differs from rank 0: {differing}", fix)
    group.watch(before)
    return group


def find_interface(env: Mapping[str, str]) -> str:
    """Name of the network interface over which ranks exchange, by the variables of a launcher. Raises ConfigError."""
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        return LOOPBACK  # all of them are on this machine
    name, why = env.get("MASTER_ADDR", ""), ""
    try:
        address = ip_address(socket.gethostbyname(name))
        interface = interface_towards(str(address))
    except (OSError, UnicodeError) as error:  # the latter: it is no name of a host
        why = f"it cannot be reached over IPv4 ({getattr(error, 'strerror', None) or error})"
    else:
        if address.is_global:
            why = "it is public, and what ranks exchange is neither encrypted nor authenticated"
        elif address.is_unspecified or (address.is_loopback and "LOCAL_WORLD_SIZE" in env):
            why = "ranks on other machines cannot reach it"
    if why:
        raise ConfigError("MASTER_ADDR", name, why, "give the address of rank 0's machine in a private network")
    return interface


def _find_others(rank: int, size: int, seconds: float) -> None:
    """Wait for the others on a thread: signals end this wait. ConfigError after `seconds`, PeerLost if one ends."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            with losing_peers():
                dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_SECONDS))
        except Exception as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(REPORT_SECONDS)
    address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    where = f"the other {size - 1} (WORLD_SIZE={size}) at {address}"
    if thread.is_alive():
        print(f"rank {rank} waits for {where}", file=sys.stderr, flush=True)
        thread.join(max(0.0, seconds - REPORT_SECONDS))
    if thread.is_alive():
        fix = "start all ranks (on one machine: accelerate launch --multi_gpu --num_processes 2), or unset WORLD_SIZE"
        why = f"rank {rank} has waited {seconds:g} s for {where} (--hang-seconds)"
        raise ConfigError("WORLD_SIZE", size, why, fix)
    if errors:
        raise errors[0]


def read_ranks(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) by the environment variables of a launcher; (0, 1) without one.

    `accelerate launch` sets no variable to the number of processes that it was asked for. Where it starts one process
    itself, it sets MASTER_ADDR if that number is above 1, and never WORLD_SIZE.
    """
    if "WORLD_SIZE" not in env or "RANK" not in env:
        if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
            why = "accelerate launch has started one process only, as it does without --multi_gpu"
            fix = "add --multi_gpu (ranks on the CPU need it too), or give --num_processes 1"
            raise ConfigError("num_processes", "2 or more", why, fix)
        return 0, 1
    return int(env["RANK"]), int(env["WORLD_SIZE"])


@contextmanager
def one_voice() -> Iterator[None]:
    """Have rank 0 alone print: others print nothing but the error of their own that ends them.

    That rank 0 has ended, or refuses the same bad input, is no error of theirs: it says so itself. They print it where
    its screen is another one: the first rank of each other machine does. The `with` block of one that is silent ends.
    """
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    if rank == "0":
        yield
        return
    null, stderr = os.open(os.devnull, os.O_WRONLY), os.fdopen(os.dup(2), "w")
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(null, fd)
    is_elsewhere = os.environ.get("GROUP_RANK", "0") != "0"
    speaks = is_elsewhere and os.environ.get("LOCAL_RANK") == "0"
    try:
        yield
    except ConfigError as error:
        time.sleep(0 if speaks else REFUSAL_SECONDS)  # by then the launcher has ended it, if another was refused too
        print(f"error: {error}", file=stderr, flush=True)
        raise
    except (PeerLost, TrainingError) as error:
        if speaks:
            print(f"error: {error}", file=stderr, flush=True)
        if is_elsewhere:
            raise
    except Exception:
        print(f"rank {rank} failed:", traceback.format_exc(), file=stderr, flush=True)
        raise
