"""Ranks: processes that `accelerate launch` or torchrun starts on one machine, each with a share of the members.

They exchange bytes over the loopback interface, and never unpickle what they receive. The launcher's own store, through
which they find each other, is torch's and listens on all interfaces.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from a3c_mp._bootstrap import end_with_parent
from a3c_mp.errors import ConfigError, PeerLost
from a3c_mp.population.settings import Args
from a3c_mp.processes.learner_group import LOOPBACK, LearnerGroup, losing_peers

RANK_SECONDS = 1800.0
"""longest time that a rank waits for another, which may have a generation of slow games to play"""
REPORT_SECONDS = 3.0
"""time that a rank waits for the others before it reports that"""
REFUSAL_SECONDS = 20.0
"""longest time that rank 0 may take longer than others to find the same bad input"""


def join(args: Args) -> LearnerGroup:
    """Connect to the other ranks, if a launcher has started several; raises ConfigError and PeerLost."""
    rank, size = read_ranks(os.environ)
    if size == 1:
        return LearnerGroup()
    if size > args.population:
        why = f"each of {size} ranks needs at least one"
        raise ConfigError("population", args.population, why, "raise it, or start fewer processes")
    try:
        from accelerate import PartialState
    except ImportError:
        raise ConfigError("WORLD_SIZE", size, "several ranks need accelerate", "pip install accelerate") from None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGTERM)  # the launcher, which may be killed
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    # gloo, whatever the launcher assumes
    _find_others(lambda: PartialState(cpu=True, timeout=timedelta(seconds=RANK_SECONDS)), rank, size, args.hang_seconds)
    group = LearnerGroup(rank, size)
    digests = group.all_gather_bytes(hashlib.sha256(repr(args).encode()).digest())
    if differing := [other for other, digest in enumerate(digests) if digest != digests[0]]:
        fix = "start all ranks by one command: accelerate launch --multi_gpu --num_processes 2"
        raise ConfigError("RANK", differing[0], "its settings differ from those of rank 0", fix)
    return group


def _find_others(connect: Callable[[], object], rank: int, size: int, seconds: float) -> None:
    """Call `connect`, which waits for the other ranks inside torch, on a thread of its own: signals end this wait.

    Raises ConfigError if they have not all come after so many seconds, PeerLost if one of them ends.
    """
    errors: list[Exception] = []

    def work() -> None:
        try:
            with losing_peers():
                connect()
        except Exception as error:  # raised below
            errors.append(error)

    thread, start, is_reported = threading.Thread(target=work, daemon=True), time.monotonic(), False
    thread.start()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    while thread.is_alive():
        thread.join(0.2)
        waited = time.monotonic() - start
        if waited > REPORT_SECONDS and not is_reported:
            is_reported = True
            text = f"rank {rank} waits for the other {size - 1} (WORLD_SIZE={size}) at {where}"
            print(text, file=sys.stderr, flush=True)
        if waited > seconds and thread.is_alive():
            fix = "start all ranks by one command: accelerate launch --multi_gpu --num_processes 2; or unset WORLD_SIZE"
            why = f"rank {rank} has waited {seconds:g} s for the other {size - 1} at {where} (--hang-seconds)"
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
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if size > 1 and (address := env.get("MASTER_ADDR", "")) not in ("127.0.0.1", "::1", "localhost"):
        why = "ranks communicate over the loopback interface, which this is not"
        raise ConfigError("MASTER_ADDR", address, why, "start all ranks on one machine")
    return rank, size


@contextmanager
def one_voice() -> Iterator[None]:
    """Have rank 0 alone print: others print nothing but the traceback of an error of their own that ends them.

    Rank 0 also ends first where all refuse the same bad input: the launcher ends all ranks when one of them ends.
    """
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    if rank == "0":
        yield
        return
    null, stderr = os.open(os.devnull, os.O_WRONLY), os.fdopen(os.dup(2), "w")
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(null, fd)
    try:
        yield
    except ConfigError as error:
        time.sleep(REFUSAL_SECONDS)  # by then the launcher has ended this rank, if rank 0 was refused too
        print(f"error: {error}", file=stderr, flush=True)
        raise
    except PeerLost:  # the end of another rank, which says why itself
        raise
    except Exception:
        print(f"rank {rank} failed:", traceback.format_exc(), file=stderr, flush=True)
        raise
