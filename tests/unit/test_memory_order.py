"""Shared memory without locks, on a processor that reorders loads and stores: every order is explored, none may break.

The programs of the processes are recorded from the code as it runs: what it loads, stores, and its memory barriers. An
operation of a process may overtake any earlier one, unless a barrier lies between them, both are at one place, or it is
a store that happens only after what the other loads. There is one memory, as in Arm's model (Pulte et al. 2018), in
which a store is seen by all other processes at once; what it orders besides, as loads by their addresses, is free.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from a3c_mp.processes import memory_order
from a3c_mp.processes.weights import Weights
from a3c_mp.replay.replay import Replay
from a3c_mp.replay.shards import COUNTERS, Shards
from a3c_mp.replay.writer import EnvStep, Writer

PUBLISHED = {*COUNTERS, "published", "writing"}
BY_FUNCTIONS = {"store": PUBLISHED, "load": {*PUBLISHED, "tail"}}  # counters that `memory_order` stores or loads


class Op(NamedTuple):
    kind: str  # "load", "store" or "barrier"
    place: str = ""
    value: int = 0  # that is stored
    register: str = ""  # where it is loaded to
    needs: str = ""  # register: a store waits for it, and does not happen where it is 0


def outcomes(programs, memory):
    """Every {register: value} at the end, of all orders in which the programs can run."""
    start = frozenset(memory.items()), frozenset(), (0,) * len(programs)  # memory, registers, operations done (bits)
    seen, left = {start}, [start]
    while left:
        memory, registers, done = left.pop()
        stored, loaded = dict(memory), dict(registers)
        if all(bits + 1 == 1 << len(ops) for ops, bits in zip(programs, done, strict=True)):
            yield loaded
        for thread, ops in enumerate(programs):
            for i in runnable(ops, done[thread], loaded):
                op, now, known = ops[i], stored, loaded
                if op.kind == "load":
                    known = loaded | {op.register: stored[op.place]}
                elif op.kind == "store" and loaded.get(op.needs, 1):
                    now = stored | {op.place: op.value}
                bits = (*done[:thread], done[thread] | 1 << i, *done[thread + 1 :])
                state = frozenset(now.items()), frozenset(known.items()), bits
                if state not in seen:
                    seen.add(state)
                    left.append(state)


def runnable(ops, done, loaded):
    """Numbers of the operations of a program that can be the next."""
    waiting: list[Op] = []  # earlier ones that are not done
    for i, op in enumerate(ops):
        if done >> i & 1:
            continue
        overtakes = op.kind != "barrier" and all(other.place != op.place for other in waiting)
        if (overtakes or not waiting) and (not op.needs or op.needs in loaded):
            yield i
        if op.kind == "barrier":
            return
        waiting.append(op)


class Recorded(np.ndarray):
    """An array whose loads and stores are on a tape, by the place that it lies at."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if not (isinstance(found, np.ndarray) and np.shares_memory(found, self)):  # a copy, not a view
            TAPE.add("load", self)
        return found

    def __setitem__(self, key, value):
        TAPE.add("store", self)
        super().__setitem__(key, value)


class Tape(list):
    """(kind, name of the memory) of what the code does, in its order."""

    def name(self, name, array):
        address = array.__array_interface__["data"][0]
        self.names[range(address, address + array.nbytes)] = name
        return array.view(Recorded)

    def add(self, kind, array):
        address = array.data_ptr() if isinstance(array, torch.Tensor) else array.__array_interface__["data"][0]
        self.extend((kind, name) for places, name in self.names.items() if address in places)

    def array(self, counters):
        """In place of `np.array`, by which counters are read."""
        self.add("load", counters)
        return np.array(counters)

    def of(self, function, *args):
        self.clear()
        function(*args)
        return list(self)


TAPE = Tape()


@pytest.fixture(autouse=True)
def tape(monkeypatch):
    TAPE.names = {}
    monkeypatch.setattr(memory_order, "barrier", lambda: TAPE.append(("barrier", "")))
    monkeypatch.setattr(memory_order, "np", TAPE)
    copy, select = torch._foreach_copy_, torch.index_select

    def foreach_copy(targets, sources):
        TAPE.add("store", targets[0])
        TAPE.add("load", sources[0])
        copy(targets, sources)

    def index_select(source, *args, **kwargs):
        TAPE.add("load", source)
        return select(source, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    monkeypatch.setattr(torch, "index_select", index_select)


def without(tape, missing):
    """A tape without barriers: all of them, or those "before" or "behind" the loads, or the stores, of counters."""
    if missing == "all":
        return [op for op in tape if op[0] != "barrier"]
    way, _, where = missing.partition(" ")
    kinds = [kind if name in BY_FUNCTIONS.get(kind, ()) else "" for kind, name in tape]
    beside = [*kinds[1:], ""] if where == "before" else ["", *kinds[:-1]]
    return [op for op, kind in zip(tape, beside, strict=True) if op[0] != "barrier" or kind != way]


def torn_weights(missing):
    """Outcomes in which a reader takes values for a version that are not all of that version."""
    net = nn.Linear(1, 1)
    weights = Weights(net)
    TAPE.name("values", weights.buffers.numpy())
    weights.versions = [TAPE.name(name, np.array(0)) for name in ("published", "writing")]
    learner: list[Op] = []
    for version in (1, 2, 3):
        for kind, name in without(TAPE.of(weights.publish, net), missing):
            if name == "values":
                learner += [Op(kind, f"{part}{version % 2}", version) for part in "xy"]
            elif kind != "load":  # of its own counter
                learner.append(Op(kind, name, version))
    values, actor = ("x0", "y0", "x1", "y1"), []
    for kind, name in without(TAPE.of(weights.load, net), missing):  # which loads from one of the two buffers
        actor += [Op(kind, place, register=place) for place in (values if name == "values" else [name])]
    for end in outcomes([learner, actor], dict.fromkeys(["published", "writing", *values], 0)):
        found = end["published"]
        if end["writing"] < found + 2 and {end[f"x{found % 2}"], end[f"y{found % 2}"]} != {found}:
            yield end


def torn_transitions(missing):
    """Outcomes in which the learner takes a transition that is not whole, or another one than it means."""
    shards = Shards(1, 1, 8, Box(-1, 1, (1,)), Discrete(2))
    replay, actor = Replay(shards, 0.5, seed=1), Writer(shards, 0, 1, 0.9)
    one = np.ones(1)
    step = EnvStep(one[:, None], one, one, one > 0, one < 0, one, one)
    for _ in range(7):  # all but one row of the ring
        actor.step(step)
    replay.ingest(0)
    for name in (*COUNTERS, "frame", "reward"):
        setattr(shards, name, TAPE.name(name, getattr(shards, name)))
    actor.arrays = shards.arrays(0)
    replay.tail = TAPE.name("tail", replay.tail)
    tapes = [TAPE.of(replay.sample, 1), TAPE.of(replay.make_room, 0, 2), TAPE.of(actor.step, step)]
    sampling, retiring, writing, taking = (without(tape, missing) for tape in [*tapes, TAPE.of(replay.ingest, 0)])
    # The row that is written has 1 in both fields, the one that is retired for it 0; so have counters before and after.
    row = "frame", "reward"

    def program(tape, *places, name="", needs=""):
        return [
            Op(kind, place, 1, f"{name}{place}", needs * (kind == "store"))
            for kind, place in tape
            if kind == "barrier" or place in places
        ]

    learner = program(sampling, *row, name="old ") + program(retiring, "tail", "writable_until")
    learner += program(taking, "committed") + program(sampling, *row, name="new ")
    thread = program(sampling, *row, "tail", name="ahead ")
    process = program(writing, *row, "writable_until", "committed", needs="writable_until")
    programs = learner, thread, process
    for end in outcomes(programs, dict.fromkeys([*row, "tail", "writable_until", "committed"], 0)):
        old, ahead, new = ({end[f"{name} {field}"] for field in row} for name in ("old", "ahead", "new"))
        if old != {0} or (end["ahead tail"] == 0 and ahead != {0}) or (end["committed"] == 1 and new != {1}):
            yield end


@pytest.mark.parametrize("torn", [torn_weights, torn_transitions])
def test_no_order_of_loads_and_stores_gives_a_reader_what_is_not_whole(torn):
    assert next(torn("none"), None) is None


BARRIERS = ["store before", "load before", "load behind"]


@pytest.mark.parametrize(
    ("torn", "missing"),
    [*itertools.product([torn_weights, torn_transitions], ["all", *BARRIERS]), (torn_weights, "store behind")],
)
def test_without_these_barriers_there_is_such_an_order(torn, missing):
    assert next(torn(missing), None) is not None
