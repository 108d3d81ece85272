"""Ranks: processes that `accelerate launch` or torchrun starts, each with a share of a population's members.

All run the same script on one machine. They exchange bytes over the loopback interface, and never unpickle what they
receive. The launcher's own store, through which they find each other, is torch's and listens on all interfaces.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import TextIO

import torch

from a3c_mp._bootstrap import end_with_parent
from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError, PeerLost, TrainingError
from a3c_mp.processes.learner_group import LOOPBACK, LearnerGroup, Stateful, from_bytes, losing_peers
from a3c_mp.run.replica import ReplicaRun

RANK_SECONDS = 1800.0
"""longest time that a rank waits for another, which may have a generation of slow games to play"""
REFUSAL_SECONDS = 20.0
"""longest time that rank 0 may take longer than others to find the same bad input"""
ONE_COMMAND = "start all ranks by one command: accelerate launch --multi_gpu --num_processes 2"


def join(args: CommonArgs, seconds: float = RANK_SECONDS) -> LearnerGroup:
    """Connect to the other ranks; alone, at once and without accelerate, where no launcher has started several.

    Args:
        args: settings, which must be the same in all ranks.
        seconds: timeout of each collective operation.

    Raises:
        ConfigError: the launcher has started fewer processes than it was asked for, or more than there are members;
            accelerate is not installed, the ranks are on several machines, or their settings differ.
        PeerLost: another rank has died, or gave no answer in time.
    """
    rank, size = read_ranks(os.environ)
    if size == 1:
        return LearnerGroup()
    silence_other_ranks()
    if size > args.num_actors:
        why = f"each of {size} ranks needs at least one"
        raise ConfigError(args.actors_flag, args.num_actors, why, "raise it, or start fewer processes")
    try:
        from accelerate import PartialState
    except ImportError:
        raise ConfigError("WORLD_SIZE", size, "several ranks need accelerate", "pip install accelerate") from None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGTERM)  # the launcher, which may be killed
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    with losing_peers():
        state = PartialState(cpu=True, timeout=timedelta(seconds=seconds))  # gloo, whatever the launcher assumes
    if (state.process_index, state.num_processes) != (rank, size):
        why = f"accelerate counts {state.num_processes} processes"
        raise ConfigError("WORLD_SIZE", size, why, ONE_COMMAND)
    group = LearnerGroup(rank, size)
    check_settings(group, args)
    return group


def follow(train: Callable[..., None], args: CommonArgs, population: Stateful, group: LearnerGroup) -> int:
    """Run `train(args, run, population, group, None)` in a rank besides 0; returns its exit code.

    Rank 0 writes the run and decides when it ends. Its exit code says how, so that of the others is 0, unless they fail
    by themselves.
    """
    with suppress(PeerLost, TrainingError):  # rank 0 has ended, or fails alike and says why
        train(args, ReplicaRun(args, group.rank, steps=0, updates=0), population, group, None)
    return 0


def read_ranks(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) by the environment variables of a launcher; (0, 1) without one.

    `accelerate launch` sets no variable to the number of processes that it was asked for. Where it starts one process
    itself, it sets MASTER_ADDR if that number is above 1, and never WORLD_SIZE.

    Raises:
        ConfigError: see `join`.
    """
    if "WORLD_SIZE" not in env:
        if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env:
            why = "accelerate launch has started one process only, as it does without --multi_gpu"
            fix = "add --multi_gpu (ranks on the CPU need it too), or give --num_processes 1"
            raise ConfigError("num_processes", "2 or more", why, fix)
        return 0, 1
    size, rank = read_int(env, "WORLD_SIZE"), read_int(env, "RANK")
    if not 0 <= rank < size:
        raise ConfigError("RANK", rank, f"WORLD_SIZE is {size}", ONE_COMMAND)
    if size > 1 and not is_loopback(address := env.get("MASTER_ADDR", "")):
        why = "ranks communicate over the loopback interface, which this is not"
        raise ConfigError("MASTER_ADDR", address, why, "start all ranks on one machine")
    return rank, size


def read_int(env: Mapping[str, str], name: str) -> int:
    """An environment variable as a number. Raises ConfigError if it is missing or none."""
    try:
        return int(env.get(name, ""))
    except ValueError:
        raise ConfigError(name, env.get(name, ""), "must be a whole number", ONE_COMMAND) from None


def is_loopback(address: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address or None, 0)} if address else set()
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def check_settings(group: LearnerGroup, args: CommonArgs) -> None:
    """Raise ConfigError, in all ranks, if the settings of one differ from those of rank 0."""
    digests = group.all_gather(from_bytes(hashlib.sha256(repr(args).encode()).digest())[None])
    for rank, digest in enumerate(digests):
        if not torch.equal(digest, digests[0]):
            if group.rank != 0:  # wait until rank 0 has said so: the launcher ends all ranks when one of them ends
                with suppress(PeerLost):
                    group.all_gather(digests)
            raise ConfigError("RANK", rank, "its settings differ from those of rank 0", ONE_COMMAND)


@contextmanager
def refused_once() -> Iterator[None]:
    """Have rank 0 alone print a ConfigError, and end first: the launcher ends all ranks when one of them ends."""
    stderr = silence_other_ranks()
    try:
        yield
    except ConfigError as error:
        if stderr is not None:
            time.sleep(REFUSAL_SECONDS)  # by then the launcher has ended this rank, if rank 0 was refused too
            stderr.write(f"error: {error}\n")
            stderr.flush()
        raise


def own_rank() -> str:
    """This process's rank as the launcher wrote it, before it is checked; "0" without a launcher."""
    return os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"


def silence_other_ranks() -> TextIO | None:
    """Discard what ranks besides 0 print, except for the traceback of an error of their own that ends them.

    `join` and `refused_once` do this.

    Returns:
        stderr as it was, in ranks besides 0.
    """
    rank = own_rank()
    if rank == "0" or sys.excepthook is not sys.__excepthook__:
        return None
    stderr = os.fdopen(os.dup(2), "w")

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PeerLost):  # the end of another rank, which says why itself
            stderr.write(f"rank {rank} failed:\n" + "".join(traceback.format_exception(kind, error, trace)))
            stderr.flush()

    sys.excepthook = show
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
    return stderr
