"""What ranks do in the tests, one mode for each; rank 0 prints the pids of all once they have met."""

import os
import signal
import sys

import psutil

from a3c_mp.population import ranks
from a3c_mp.population.dqn import Args
from a3c_mp.run.script import exit_with


def exchange(group):
    """Exchange bytes of several lengths, also none; returns the pids of all."""
    assert group.all_gather_bytes(b"x" * 7 * group.rank) == [b"x" * 7 * rank for rank in range(group.size)]
    return [data.decode() for data in group.all_gather_bytes(str(os.getpid()).encode())]


def run(mode: str) -> int:
    group = ranks.join(Args(seed=int(os.environ.get("RANK", 0)) if mode == "differ" else 1))
    print(f"rank {group.rank}:", *exchange(group), flush=True)
    if mode == "meet":
        own = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        listening = group.all_gather_bytes(",".join(own).encode())
        print("listening:", *sorted(set(b",".join(listening).decode().split(","))))
        group.leave()
        return 0
    if mode != "run":  # the launcher sends one when a rank ends; here only a broken connection ends the others
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        exchange(group)
        if mode == f"rank {group.rank} raises":
            raise ArithmeticError(f"rank {group.rank} cannot go on")


def main() -> int:
    ranks.RANK_SECONDS = 60.0
    with ranks.one_voice():
        return run(sys.argv[1])


if __name__ == "__main__":
    exit_with(main)
