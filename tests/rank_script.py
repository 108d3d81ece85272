"""What ranks do in the tests, one mode for each; rank 0 prints the pids of all once they have met."""

import os
import signal
import sys

import psutil

from a3c_mp.population import ranks
from a3c_mp.population.settings import Args
from a3c_mp.run.script import exit_with


def exchange(group):
    """Exchange bytes of several lengths, also none."""
    assert group.all_gather_bytes(b"x" * 7 * group.rank) == [b"x" * 7 * rank for rank in range(group.size)]
    for sent in (b"births \0 of this generation", b""):
        assert group.broadcast_bytes(sent if group.rank == 0 else b"") == sent
    return [data.decode() for data in group.all_gather_bytes(str(os.getpid()).encode())]


def main() -> int:
    mode = sys.argv[1]
    rank = int(os.environ.get("RANK", 0))
    ranks.RANK_SECONDS = 60.0
    with ranks.refused_once():
        group = ranks.join(Args(seed=rank if mode == "differ" else 1))
    pids = exchange(group)
    print(f"rank {group.rank}:", *pids, flush=True)
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


if __name__ == "__main__":
    exit_with(main)
