"""Attack test: a training that listens on TCP (chapter 5), and 200 hostile connections, with the key or without.

Runs train_task.py on this machine, attacks its port for a while, and looks at the memory of its first process and at
its rate of learning before, meanwhile and after. Ends with code 1 if its memory has grown by more than `--max-mib`, a
node of its own was lost, or it did not learn on. Flags that are not listed here are the trainer's.

    python bench/attack.py                                          # each kind of attack for 60 s
    python bench/attack.py --rows parts --seconds 10 --connections 20
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil
import zmq

from a3c_mp.cli import parse_own
from a3c_mp.config import Between
from a3c_mp.run.script import exit_with
from a3c_mp.task.endpoint import Endpoint, read_key
from a3c_mp.task.exchange import JOIN
from a3c_mp.task.sockets import ENDED, FAILED
from a3c_mp.task.wire import encode
from bench import common
from bench.common import RowArgs, as_recorded, run_folder, running_script, trainer_settings
from bench.records import Result, begin, in_turns, markdown_table, measure

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(15 + 1 + 31)
"""of version 3.1 of zmq's protocol, with encryption"""
CHUNK = 60_000


@dataclass(frozen=True)
class Args(RowArgs):
    chapter: common.ChapterName = "task"
    """what is attacked; the only one that listens"""
    rows: tuple[str, ...] = ("frames", "idle", "drip", "flood", "joined", "small", "parts", "joins")
    """attacks; of strangers: frames that are too large or fill their size, idle and slow connections; with the key:
    messages without joining, of a node that has joined (large, small), parts without end, joining again and again"""
    seconds: Annotated[float, Between(1)] = 60.0
    """length of an attack; the times before and after it are a quarter of that"""
    connections: Annotated[int, Between(1, 5000)] = 200
    """at the same time; each that is cut off is replaced at once"""
    max_mib: Annotated[float, Between(0)] = 100.0
    """most by which memory may grow"""


# ---- the attackers


def strangers(row: str, address: str, number: int) -> None:
    """Connections without the key: what they send, over and over."""
    host, port = address.removeprefix("tcp://").split(":")
    size = 2**16 if row == "drip" else 2**27 - 1
    first = {"idle": b"", "drip": GREETING[:1], "frames": GREETING + b"\6" + size.to_bytes(8, "big")}[row]
    rest = {"idle": b"", "drip": b"x", "frames": bytes(CHUNK)}[row]
    sockets = list[socket.socket]()
    while True:
        while len(sockets) < number:
            with suppress(OSError):
                sockets.append(socket.create_connection((host, int(port)), timeout=5))
                sockets[-1].sendall(first)
                sockets[-1].setblocking(False)
        for each in list(sockets):
            try:
                if rest:
                    each.send(rest)
                elif not each.recv(1000):
                    raise ConnectionError
            except BlockingIOError:
                pass
            except OSError:
                each.close()
                sockets.remove(each)
        time.sleep(0.001 if row == "frames" else 0.1)


def holders(row: str, address: str, key_file: Path, number: int) -> None:
    """Connections with the key: as many messages as they can send, and another connection when one is cut off."""
    key, context = read_key(key_file), zmq.Context(io_threads=2)
    context.max_sockets = 20_000
    versions = Endpoint().versions
    messages: dict[str, list[Any]] = {
        "flood": [bytes(CHUNK)] * 10, "joined": encode("event", ["x" * 1_000_000]), "small": encode("event", []),
        "parts": [zmq.Frame(bytes(2**16))] * 20_000, "joins": encode(JOIN, ["attacker"]),
    }  # fmt: skip

    def attack() -> Iterator[None]:
        with context.socket(zmq.DEALER) as client:
            client.linger, client.sndhwm, client.reconnect_ivl = 0, 10, -1
            client.curve_publickey, client.curve_secretkey, client.curve_serverkey = *key, key.public
            monitor = client.get_monitor_socket(FAILED | ENDED)
            client.connect(address)
            if row != "flood":
                client.send_multipart(encode("node.hello", [0, versions, os.urandom(8).hex()]))
            patience = time.monotonic() + 5
            while not monitor.poll(0) and time.monotonic() < patience:
                if row == "flood" or client.poll(0):  # it has joined
                    break
                yield
            while not monitor.poll(0):
                with suppress(zmq.Again):
                    for _ in range(100):
                        client.send_multipart(messages[row], zmq.NOBLOCK, copy=False)
                yield
            client.disable_monitor()
            monitor.close(0)

    attacks = [attack() for _ in range(number)]
    while True:
        for index, each in enumerate(attacks):
            if next(each, each) is each:
                attacks[index] = attack()
        time.sleep(0.001)


# ---- the run


def mib(pid: int) -> float:
    return round(psutil.Process(pid).memory_info().rss / 2**20, 1)


def run_row(args: Args, flags: list[str], row: str) -> Result:
    """Train for a while, under attack for as long, and again without."""
    folder, port = run_folder(args, f"attack-{row}").absolute(), free_port()
    folder.parent.mkdir(parents=True, exist_ok=True)
    key_file = folder.parent / f"{folder.name}.key"
    address = f"tcp://127.0.0.1:{port}"
    place = [
        f"--runs-dir={folder.parent}",
        f"--run-name={folder.name}",
        f"--listen={address}",
        f"--key-file={key_file}",
    ]
    samples = list[dict[str, Any]]()
    with running_script(["train_task.py", *flags, *place]) as process:
        began = time.monotonic()

        def watch(phase: str, until: Callable[[float], bool]) -> None:
            start = time.monotonic()
            while process.poll() is None and not until(time.monotonic() - start):
                time.sleep(1.0)
                seconds = round(time.monotonic() - began, 2)
                steps = common.steps_taken(folder)
                samples.append({"seconds": seconds, "phase": phase, "memory_mib": mib(process.pid), "steps": steps})

        watch("start", lambda seconds: common.steps_taken(folder) > 5000 or seconds > 120)
        watch("before", lambda seconds: seconds > args.seconds / 4)
        target, who = (
            (strangers, (row, address)) if row in ("frames", "idle", "drip") else (holders, (row, address, key_file))
        )
        halves = args.connections // 2, args.connections - args.connections // 2
        with multiprocessing.get_context("spawn").Pool(2) as attackers:
            attackers.map(len, [[], []])  # they have loaded everything
            for half in halves:
                attackers.apply_async(target, (*who, half), error_callback=print)
            watch("attack", lambda seconds: seconds > args.seconds)
        watch("after", lambda seconds: seconds > args.seconds / 4)
    code, log = process.returncode, (folder / "run.log").read_text()
    return figures(samples) | {
        "exit_code": code, "own_nodes_lost": log.count("cut off and is back") + log.count("does not read"),
        "restarts": common.read_summary(folder)["worker_restarts"],
        "lines": sum("WARNING" in line for line in log.splitlines()), "samples": samples,
    }  # fmt: skip


def figures(samples: list[dict[str, Any]]) -> Result:
    """Growth of memory (MiB) over its most before the attack, and steps a second of each phase."""
    phases = {name: [each for each in samples if each["phase"] == name] for name in ("before", "attack", "after")}
    found: Result = {"memory_before": max(each["memory_mib"] for each in phases["before"])}
    most = max(each["memory_mib"] for each in phases["attack"] + phases["after"])
    found["growth_mib"] = round(most - found["memory_before"], 1)
    for name, each in phases.items():
        if not each:
            raise SystemExit("the training has ended; see above")
        found[f"sps_{name}"] = round(
            (each[-1]["steps"] - each[0]["steps"]) / (each[-1]["seconds"] - each[0]["seconds"])
        )
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


COLUMNS = (
    "memory_before",
    "growth_mib",
    "sps_before",
    "sps_attack",
    "sps_after",
    "own_nodes_lost",
    "restarts",
    "lines",
)


def table(result: Result) -> str:
    rows = [[run["row"], *(str(run[name]) for name in COLUMNS)] for run in result["runs"]]
    return markdown_table(["attack", *COLUMNS], rows)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    common.check_rows(args.rows, Args.rows)
    flags = ["--env-id=CartPole-v1", "--total-steps=1e9", "--stop-return=501", "--eval-every=0", *flags]
    settings = {row: as_recorded(trainer_settings(["train_task.py", *flags])) for row in args.rows}
    path, result = begin("attack", args, "CartPole-v1", settings)
    result = measure(path, result, in_turns(args.rows, 1), lambda row, seed: run_row(args, flags, row), table)
    bad = [
        run["row"] for run in result["runs"]
        if run["growth_mib"] > args.max_mib or run["own_nodes_lost"] or run["restarts"] or not run["sps_attack"]
    ]  # fmt: skip
    if bad:
        print(f"attacks that did harm: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    exit_with(main)
