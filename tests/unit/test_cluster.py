"""Parts of chapter 7 without Ray, or with Ray as threads of this process."""

import argparse
import contextlib
import copy
import errno
import gc
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import inline_ray
import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp
from gymnasium.spaces import Box, Discrete
from harness import RAY_DQN, still_alive
from inline_ray import ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayActorError, Reference
from nodes import free_port
from torch import nn

from a3c_mp.algorithms import apex, dqn
from a3c_mp.algorithms.ray_trainer import check_gpu, check_node, check_store
from a3c_mp.cluster import __main__ as command
from a3c_mp.cluster import access, guardian, node, parameters, remote_replay
from a3c_mp.cluster import fleet as fleet_module
from a3c_mp.cluster import session as session_module
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.learners import RayProcess
from a3c_mp.cluster.node import ClusterAddress, Node, check_installed, foreign
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.placement import ClusterState, choose
from a3c_mp.cluster.ray_worker import Packer, RayWorker
from a3c_mp.cluster.remote_replay import CONTINUED, Outbox, RemoteReplay, ReplayShard, ReplaySpec
from a3c_mp.cluster.session import Session
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.errors import ConfigError, PeerLost, WorkerError
from a3c_mp.processes import supervisor
from a3c_mp.processes.pool import WorkerOptions
from a3c_mp.processes.supervisor import Child
from a3c_mp.replay import EnvStep, Writer
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.progress import Progress

FRAME = (3, 2)


# ---- messages


def stacks(rng, done):
    """Observations [T+1, B, 4, ...] as environments make them: the last four frames of an episode, zeros before."""
    steps, envs = done.shape
    obs = np.zeros((steps + 1, envs, 4, *FRAME), np.uint8)
    obs[0] = rng.integers(1, 255, obs[0].shape)
    for t in range(steps):
        obs[t + 1, :, :-1] = np.where(done[t, :, None, None, None], 0, obs[t, :, 1:])
        obs[t + 1, :, -1] = rng.integers(1, 255, obs[t + 1, :, -1].shape)
    return obs


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_rollouts_arrive_bit_for_bit_with_a_frame_for_each_step(share):
    rng = np.random.default_rng(0)
    spec = rollout_spec(20, 3, Box(0, 255, (4, *FRAME), np.uint8), Discrete(2))
    packer = Packer(spec, stack=4)
    sent, received = packer.empty(), {name: torch.ones_like(field) for name, field in packer.empty().items()}
    sent["terminated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["truncated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["obs"][:] = torch.from_numpy(stacks(rng, (sent["terminated"] | sent["truncated"]).numpy()))
    sent["reward"].normal_()
    packed = packer.pack(sent)
    packer.unpack(packed, received)
    assert all(torch.equal(received[name], sent[name]) for name in spec)
    assert packed["obs"].nbytes / sent["obs"].numel() < 0.3


# ---- replay shards


SPEC = ReplaySpec(num_envs=2, obs_space=Box(-9, 9, (1,), np.float32), action_space=Discrete(5), stack=1)


class Acting:
    """Writes steps of two environments, some of which end, into an outbox or into shared memory."""

    def __init__(self, ring, seed, successor_state=None):
        self.rng, self.writer = np.random.default_rng(seed), Writer(ring, 0, 3, 0.9, successor_state)

    def steps(self, count):
        for _ in range(count):
            random = self.rng.random((5, 2))
            obs = random[:1].T.astype(np.float32)
            ended = random[1] < 0.2, random[2] < 0.2
            step = EnvStep(obs, (random[3] * 5).astype(int), random[4], *ended, random[0], random[1])
            self.writer.step(step._replace(final_obs=obs + 1, final_value=random[2]))


def shard_of(num_steps=0, seed=7, priority_exponent=0.5):
    """A shard for one actor, which has sent so many steps."""
    shard, outbox = ReplayShard(SPEC, 1, 40, priority_exponent, seed), Outbox(SPEC, 30, 3)
    if num_steps:
        Acting(outbox.ring, seed).steps(num_steps)
        shard.insert(0, outbox.take())
    return shard


def contents(replay):
    """What can be drawn: leaves and the rows behind them."""
    leaves = replay.tree.leaves.copy()
    drawn = np.flatnonzero(leaves)
    fields = {name: field[torch.from_numpy(drawn)].numpy() for name, field in replay.fields.items()}
    return leaves, {name: field.tolist() for name, field in fields.items() if name != "priority"}


@pytest.mark.parametrize("blocks", [2, 9])
def test_a_shard_holds_what_a_shared_memory_of_the_same_size_would(blocks):
    shard, local, outbox = shard_of(), shard_of().replay, Outbox(SPEC, 5, 3)
    sender, writer = Acting(outbox.ring, 1), Acting(local.shards, 1)
    for _ in range(blocks):
        before = local.shards.written.copy()
        sender.steps(5)
        shard.insert(0, outbox.take())
        local.make_room(0, 10)  # as much as five steps may need
        writer.steps(5)
        local.ingest(0)
        assert (local.shards.written > before).all()
    theirs, own = contents(shard.replay), contents(local)
    kept = own[0] > 0  # a shard makes room for what has come, shared memory for what may
    assert np.array_equal(theirs[0][kept], own[0][kept])
    assert shard.replay.size == np.count_nonzero(theirs[0]) >= np.count_nonzero(kept) > 10


def test_a_successor_drops_or_continues_what_was_incomplete():
    whole, cut, continued = shard_of(), shard_of(), shard_of()
    for shard in (whole, cut, continued):
        outbox = Outbox(SPEC, 8, 3)
        acting = Acting(outbox.ring, 2)
        acting.steps(4)
        shard.insert(0, outbox.take())
        if shard is not whole:  # another process
            fields = {name: field.copy() for name, field in acting.writer.fields().items()}
            state = fields if shard is continued else None
            outbox = Outbox(SPEC, 8, 3, state and SimpleNamespace(successor_state=state))
            rng, acting = acting.rng, Acting(outbox.ring, 2, state)
            acting.rng = rng
        acting.steps(4)
        shard.insert(0, outbox.take())
    assert np.array_equal(whole.replay.tree.leaves, continued.replay.tree.leaves)
    assert contents(whole.replay)[1] == contents(continued.replay)[1]
    assert cut.replay.size < whole.replay.size


@pytest.mark.parametrize(
    ("start", "is_known"),
    [(None, True), (None, False), (CONTINUED, True)],
    ids=["the same process", "sent before that was known", "its successor"],
)
@pytest.mark.parametrize("seed", range(6))  # games end at other moments
def test_what_was_incomplete_when_rows_were_lost_is_left_out(start, is_known, seed):
    whole, gap, outbox = shard_of(), shard_of(), Outbox(SPEC, 8, 3)
    acting, every = Acting(outbox.ring, seed), set()
    for number in range(14):  # more than a lap
        acting.steps(5)
        rows = outbox.take()
        whole.insert(0, rows)
        every |= rows_of(whole.replay)
        if number != 9:
            gap.insert(0, rows._replace(start=start if number == 10 else rows.start), is_known and number == 10)
        assert rows_of(gap.replay) <= every
        assert gap.replay.size == np.count_nonzero(gap.replay.tree.leaves)
    assert gap.replay.size > 20


def rows_of(replay):
    """All transitions that can be drawn."""
    return {tuple(map(str, row)) for row in zip(*contents(replay)[1].values(), strict=True)}


@pytest.mark.parametrize("start", [None, CONTINUED], ids=["the same process", "its successor"])
def test_rows_whose_beginning_went_to_a_lost_shard_are_left_out(start):
    spec = ReplaySpec(1, Box(0, 255, (4, *FRAME), np.uint8), Discrete(2), 4)
    outbox = Outbox(spec, 10, 1)
    writer = Writer(outbox.ring, 0, 1, 0.9)
    frames = [np.full(FRAME, value, np.uint8) for value in range(1, 21)]
    for t in range(20):
        stack = np.zeros((1, 4, *FRAME), np.uint8)
        for age in range(min(t + 1, 4)):
            stack[0, 3 - age] = frames[t - age]
        zeros = np.zeros(1)
        writer.step(EnvStep(stack, zeros.astype(int), zeros, zeros > 0, zeros > 0, zeros + 1, zeros))
        if t == 9:
            outbox.take()
    shard = ReplayShard(spec, 1, 40, 0.5, 7)
    shard.insert(0, outbox.take()._replace(start=start))
    obs = shard.sample(64)[2]["obs"]
    newest = obs[:, -1, 0, 0]
    assert set(newest.tolist()) <= set(range(14, 20)), "rows 11 to 13 have no whole stack here"
    assert (obs[:, 0, 0, 0] == newest - 3).all()


# ---- sessions, on threads


@pytest.fixture
def session(monkeypatch, log):
    """A session whose Ray are threads of this process."""
    session = Session(None, log.warning)
    session.ray = inline_ray.install(monkeypatch)
    session.state, session.answered = ClusterState({"node": "127.0.0.1"}), math.inf
    yield session
    session.ray.shutdown()


def test_a_head_that_does_not_answer_is_waited_for_and_then_refused(session, monkeypatch):
    monkeypatch.setattr("a3c_mp.cluster.session.BUSY_SECONDS", 0.1)
    for name in ("_connect", "_watch_head"):
        monkeypatch.setattr(session, name, lambda: None)
    session.state, session._address = ClusterState(), "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"address=10.0.0.1:6379: its head has not answered for 0 s; start it again"):
        session.__enter__()


@pytest.fixture
def make_replay(session):
    """Makes the trainer's end of shards, each a Ray actor; `make(number)` gives a shard."""

    def make_replay(make, num_shards, should_stop=lambda: False, **settings):
        defaults = {"batch_size": 50, "prefetch": 0, "deterministic": False, "max_restarts": 1, "num_learners": 1}
        args, own = SimpleNamespace(**(defaults | settings)), range(num_shards)

        def start(number):
            return session.start(session.actor_class(lambda: make(number)), (), {}, {})

        device = torch.device("cpu")
        return RemoteReplay(session, start, args, own, own, seed=1, should_stop=should_stop, device=device)

    return make_replay


def until(happened, seconds=20):
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_three_shards_are_sampled_as_one(make_replay):
    """Chi-square over 100,000 draws in proportion to priority, with shards of different sizes and sums."""
    shards = [shard_of(5 + 5 * number, number, priority_exponent=1.0) for number in range(3)]
    replay = make_replay(shards.__getitem__, 3, batch_size=500)
    replay.totals[:] = [shard.replay.tree.total for shard in shards]
    leaves = np.stack([shard.replay.tree.leaves for shard in shards], axis=1).ravel()  # as ids are numbered
    expected, counts = leaves / leaves.sum(), np.zeros(len(leaves))
    for _ in range(200):
        batch = replay.next()
        row, lane = np.divmod(batch.ids.numpy() // 3, 2)
        place = (lane * 40 + row) * 3 + batch.ids.numpy() % 3
        assert np.allclose(batch.probability, expected[place])
        counts += np.bincount(place, minlength=len(counts))
    used = expected > 0
    assert not counts[~used].any()
    chi_square = ((counts - 1e5 * expected)[used] ** 2 / (1e5 * expected[used])).sum()
    assert chi_square < used.sum() + 4 * np.sqrt(2 * used.sum())


def test_a_shard_that_is_killed_is_replaced_by_an_empty_one(make_replay, session, tape):
    replay = make_replay(lambda number: shard_of(9 if number else 0, number), 2)
    replay.totals[:], replay.sizes[:] = 1.0, 7
    session.ray.kill(replay.shards[0])
    assert (replay.next().ids % 2 == 1).all(), "all of it is of the other shard"
    assert tape.messages == ["replay shard 0 died; its 7 transitions are lost, an empty one is started"]
    replay.restarts_left = 0
    replay._replace(0, "The actor died because its node has died.")
    with pytest.raises(WorkerError, match="replay shard 0 died; no restart is left"):
        replay._replace(0, "The actor died.")


def test_so_is_one_that_ray_kills_for_want_of_memory(make_replay, tape):
    replay = make_replay(lambda number: shard_of(9, number), 1)
    answer = Reference()
    answer.set_exception(OutOfMemoryError("the node has too little memory"))
    assert replay._take_reply(0, replay.shards[0], answer) is None
    assert tape.messages == ["replay shard 0 died; its 0 transitions are lost, an empty one is started"]


def test_a_part_of_a_batch_that_is_lost_with_its_node_is_asked_for_again(make_replay, session, monkeypatch):
    replay = make_replay(lambda number: shard_of(9, number), 2)
    replay.totals[:], replay.sizes[:] = 1.0, 7
    get, lost = session.ray.get, []

    def get_later(*args, **options):
        if not lost:
            lost.append(args)
            raise ObjectLostError("no copy")
        return get(*args, **options)

    monkeypatch.setattr(session.ray, "get", get_later)
    assert len(replay.next().ids) == 50
    assert lost


def test_one_of_several_learners_repeats_its_last_batch_where_all_of_its_shards_are_lost(make_replay, session):
    """All learners take as many batches in a round, and no shard may get priorities of rows that it has not."""
    replay = make_replay(lambda number: shard_of(9, number), 1, num_learners=2)
    replay.totals[:], before = 1.0, session.ray.get(replay.shards[0].sample.remote(0))[1]
    last = replay.next()
    replay.totals[:] = 0.0
    again = replay.next()
    assert torch.equal(again.obs, last.obs)
    replay.update(again.ids, torch.ones(len(again.ids)))
    assert session.ray.get(replay.shards[0].sample.remote(0))[1] == before
    replay.update(last.ids, torch.ones(len(last.ids)))
    assert session.ray.get(replay.shards[0].sample.remote(0))[1] != before, "ids of a batch of its own count"
    lost = make_replay(lambda number: shard_of(0, number), 1, num_learners=2)
    with pytest.raises(PeerLost, match="before its first batch"):
        lost.next()


def test_a_shard_that_is_stuck_is_killed_and_replaced(make_replay, session, monkeypatch):
    """Also in deterministic runs, which wait for each insertion."""

    class StuckShard:
        def insert(self, actor, rows, after_lost):
            if rows == "second":
                assert is_killed.wait(20)
                raise RayActorError("it was killed")
            return len(rows), 1.0, {}

    is_killed = threading.Event()
    monkeypatch.setattr(session, "kill", lambda shard: is_killed.set())
    monkeypatch.setattr(remote_replay, "STUCK_SECONDS", 0.2)
    replay = make_replay(lambda number: StuckShard(), 1)
    replay.insert(0, "first")
    assert replay.size == len("first")
    replay.insert(0, "second")
    assert replay.size == 0


def test_a_parameter_server_that_is_stuck_is_killed(session, monkeypatch):
    monkeypatch.setattr(parameters, "STUCK_SECONDS", 0.2)
    answered = [False]  # in time: the trainer itself may have been away for long
    monkeypatch.setattr(session, "is_done", lambda answer, seconds: answered[0] and seconds > 0)
    monkeypatch.setattr(session, "kill", lambda server: killed.append(server))
    killed, publisher = [], Publisher(session, nn.Linear(2, 3), torch.float32, untrained=False)
    publisher.look_after()
    publisher._looked, answered[0] = time.monotonic() - 100, True
    publisher.look_after()
    assert not killed
    answered[0] = False
    until(lambda: publisher.look_after() or killed)
    assert killed[0] is publisher.server


def test_insertions_wait_for_a_shard_that_does_not_answer(make_replay):
    """Otherwise their rows would fill the object store."""

    class BusyShard:
        def insert(self, actor, rows, after_lost):
            assert go_on.wait(20)
            return len(rows), 1.0, {}

    go_on, is_over = threading.Event(), []
    replay = make_replay(lambda number: BusyShard(), 1, prefetch=1, should_stop=lambda: bool(is_over))
    replay.insert(0, "first")
    replay.insert(0, "second")
    threading.Timer(0.5, is_over.append, ["a signal"]).start()
    replay.insert(0, "third")
    assert is_over, "two wait for their answer already"
    go_on.set()
    until(lambda: replay.look_after() or replay.size == len("third"))


def test_weights_arrive_in_the_version_that_is_asked_for_also_from_a_restarted_server(session, tape, monkeypatch):
    monkeypatch.setattr(parameters, "SEND_SECONDS", 0.1)
    net, copy = nn.Linear(2, 3), nn.Linear(2, 3)
    publisher = Publisher(session, net, torch.float32, untrained=False)
    reader = Reader(publisher)
    assert reader.load(copy) == reader.load(other := nn.Linear(2, 3)) == 0
    assert torch.equal(copy.weight, other.weight), "also of an actor with two nets"
    older = net.weight.detach().clone()
    with torch.no_grad():
        net.weight += 1
    assert publisher.publish(net) == 1
    assert reader.load(copy, exact=0) == 0
    assert torch.equal(copy.weight, older)
    assert reader.load(copy, exact=1) == 1
    assert torch.equal(copy.weight, net.weight)
    until(lambda: publisher.look_after() or publisher._start)
    session.ray.kill(publisher.server, no_restart=False)
    until(lambda: publisher.look_after() or tape.messages)
    assert tape.messages == ["the parameter server died; another one is started"]
    assert reader.load(copy, exact=0) == 0, "it has both versions again"
    assert reader.load(copy) == 1


@pytest.mark.parametrize("head", ["lost", "busy", "there, and this process was stopped"])
def test_a_head_that_does_not_answer_ends_the_run_and_one_that_is_busy_has_more_time(session, monkeypatch, head):
    for name, seconds in {"ANSWER": 0.1, "SILENT": 0.3, "BUSY": 0.9, "POLL": 0.05}.items():
        monkeypatch.setattr(session_module, f"{name}_SECONDS", seconds)
    answers = head.startswith("there")
    monkeypatch.setattr(session.ray, "nodes", lambda: [] if answers else 1 / 0)
    began = session.answered = time.monotonic() - (60 if answers else 0)
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        session._address = f"127.0.0.1:{server.getsockname()[1] if head == 'busy' else 1}"
        threading.Thread(target=session._watch_head, daemon=True).start()
        session.check()
        if not answers:
            with pytest.raises(WorkerError, match="the head of the Ray cluster has not answered for"):
                until(lambda: session.check())
            assert 0.2 < time.monotonic() - began < 20
            assert (time.monotonic() - began > 0.8) == (head == "busy")
    session._ending.set()


# ---- fleets


class Counting:
    """An actor's target: it returns its number, how often it was called, the token, and which one of how many it is."""

    def __init__(self, channel, mishaps, at_start):
        self.channel, self.calls = channel, 0
        self.mishap = mishaps.pop(0) if channel.actor == 0 and mishaps else None
        if at_start and self.mishap is not None:
            self.mishap()

    def __call__(self, token):
        self.calls += 1
        self.channel.beat()
        if self.calls == 2 and self.mishap is not None:
            self.mishap()
        return (self.channel.actor, self.calls, token, self.channel.running), None


def raising(error):
    def mishap(*args, **options):
        raise error

    return mishap


DIED = raising(RayActorError("the worker died"))


class Mishaps(list):
    """What happens to the processes of actor 0, one after the other; they share it."""

    def __deepcopy__(self, memo):
        return self


@pytest.fixture
def fleets(session):
    """Makes fleets of two actors on threads; `fleets.said` is what they report of restarts."""

    def make(mishaps, at_start=False, **options):
        states = SimpleNamespace(start=0, record_start=lambda actor: None, forget=lambda actor: None)
        settings = WorkerOptions(**{"role": "actor", "slots_per_worker": 1, "niceness": 0, **options})
        target = partial(Counting, mishaps=Mishaps(mishaps), at_start=at_start)
        return Fleet(
            session, target, lambda slot, result, rows: result, {"CPU": 1.0}, 2, states=states, options=settings,
            on_restart=make.said.append,
        )  # fmt: skip

    make.said, make.session = [], session
    return make


def take(fleet, size=1):
    return fleet.take(lambda: False, size)


def take_for_ever(fleet):
    while True:
        fleet.release(take(fleet), 1)


def test_rollouts_of_an_actor_count_in_their_order_even_if_a_later_one_arrives_first(fleets, monkeypatch):
    with fleets([], slots_per_worker=2, in_order=True) as fleet:
        first, wait, waits = next(iter(fleet.actors[0].calls)), fleet.session.ray.wait, itertools.count()

        def late(references, **options):
            """As if the first result were still on its way for the first few looks."""
            arrived = [ref for ref in references if ref is not first or next(waits) > 5]
            return wait(arrived, **options) if arrived else ([], references)

        monkeypatch.setattr(fleet.session.ray, "wait", late)
        slots = [slot for _ in range(2) for _, slot, _ in take(fleet)]
        assert fleet.take(lambda: True) == []
    assert slots == [0, 2, 1, 3]


def test_a_round_is_smaller_while_an_actor_has_no_place(fleets):
    with fleets([]) as fleet:
        fleet.release(take(fleet, 2), 1)
        fleet.actors[1].is_waiting, fleet.actors[1].pid, pid = True, 0, fleet.actors[1].pid
        filled = take(fleet, 2)
        assert len(filled) == 1
        fleet.release(filled, 2)
        fleet.actors[1].is_waiting, fleet.actors[1].pid = False, pid
        found = [message.payload[3] for message in take(fleet, 2)]
        assert sorted(found) == [(0, 1), (1, 2)]


def test_an_actor_that_is_lost_while_it_waits_has_no_games(fleets):
    with fleets([]) as fleet:
        for number, is_waiting in enumerate([False, True]):
            fleet.actors[number].is_waiting = is_waiting
            fleet._fail(number, "was lost with its node", is_lost=True)
    assert [event.actor for event in fleets.said] == [0, -1]


def test_the_ladder_of_exploration_spans_the_actors_that_run(run_inline, monkeypatch):
    dealt, has_place, heartbeats, stop_reason = [], threading.Event(), RayWorker.heartbeats, Progress.stop_reason

    def late(worker):
        return heartbeats(worker) if worker.actor == 0 or has_place.wait(20) else None

    def ladder(base, exponent, actor, num_envs, num_actors):
        dealt.append((actor, num_actors))
        if dealt.count((0, 1)) == 20:
            has_place.set()
        return apex.ladder(base, exponent, actor, num_envs, num_actors)

    def stop(progress):
        return "total_steps" if len(dealt) > 20 and set(dealt[-10:]) == {(0, 2), (1, 2)} else stop_reason(progress)

    monkeypatch.setattr(Progress, "stop_reason", stop)
    monkeypatch.setattr(RayWorker, "heartbeats", late)
    monkeypatch.setattr(dqn, "ladder", ladder)
    collect = RAY_DQN, "--learning-starts", "4000", "--total-steps"
    assert run_inline.train(*collect, "20000").code == 0
    assert dealt.count((0, 1)) >= 20, "the first one plays alone"
    assert {(0, 2), (1, 2)} <= set(dealt[20:]), "until the other one finds a place"
    dealt.clear()
    assert run_inline.train(*collect, "200", "--deterministic", name="deterministic").code == 0
    assert set(dealt) == {(0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ArithmeticError("lost"), "raised an exception; restart 1 of 1"),
        (RayActorError("the worker died"), "died; restart 1 of 1"),
        (RayActorError("its node has died"), "was lost with its node"),
        (ActorUnavailableError("no connection"), "died; restart 1 of 1"),
        (ObjectLostError("no copy"), "was lost with its node"),
    ],
    ids=["exception", "death", "node", "connection", "node, as the head says later"],
)
def test_a_lost_actor_is_replaced_and_fills_its_slot_again(fleets, monkeypatch, error, said):
    """A node that is lost costs no restart."""
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 0.5)
    nodes = fleets.session.state.nodes

    def mishap():
        if isinstance(error, ObjectLostError):
            threading.Timer(0.1, nodes.clear).start()
        raise error

    with fleets([mishap], max_restarts=1, in_order=True) as fleet:
        fleet.release(first := take(fleet), 1)
        second = take(fleet)
    assert [message.payload[:2] for message in first] == [(0, 1), (1, 1)]
    assert [message.payload[:2] for message in second] == [(0, 1), (1, 2)], "a new process, and the one that was there"
    assert second[0].payload[2].version == 1
    (event,) = fleets.said
    assert event.text.splitlines()[0] == f"actor 0 (pid {os.getpid()}) {said}"
    assert event.replaced
    assert fleet.restarts == ("restart" in said)


NO_ENVIRONMENT = RayActorError("an error raised in its creation task, OSError: the node was low on memory")
NO_ENVIRONMENT.actor_init_failed = True  # as Ray has it


@pytest.mark.parametrize(
    ("mishaps", "at_start", "message"),
    [
        ([DIED, DIED], False, r"actor 0 \(pid \d+\) died; restart budget of 1 spent"),
        ([raising(ArithmeticError("no coin"))], True, r"(?s)actor 0 failed before its first result:.*no coin"),
        ([raising(NO_ENVIRONMENT)], True, r"(?s)actor 0 failed before its first result:.*the node was low on memory"),
    ],
    ids=["no restart is left", "it cannot start", "it cannot start, and speaks of a node of its own"],
)
def test_what_a_restart_does_not_help_ends_the_run(fleets, mishaps, at_start, message):
    with fleets(mishaps, at_start, max_restarts=1) as fleet, pytest.raises(WorkerError, match=message):
        take_for_ever(fleet)
    assert len(fleets.said) == len(mishaps) - 1


@pytest.fixture
def killed(session, monkeypatch):
    """Actors that are killed; `go_on` is set then."""
    monkeypatch.setattr(fleet_module, "BEAT_SECONDS", 0.05)
    killed = SimpleNamespace(actors=[], go_on=threading.Event())
    monkeypatch.setattr(session, "kill", lambda actor: (killed.actors.append(actor), killed.go_on.set()))
    return killed


def test_an_actor_without_heartbeats_is_killed_and_one_that_is_idle_is_not(fleets, killed):
    with fleets([lambda: killed.go_on.wait(20)], hang_seconds=1.0, in_order=True) as fleet:
        filled = take(fleet)
        idle_until, first = time.monotonic() + 1.5, fleet.actors[0].handle
        fleet.take(lambda: time.monotonic() > idle_until)
        assert not killed.actors
        fleet.release(filled, 1)
        take(fleet)
        assert killed.actors == [first]
    assert "sent no heartbeat for 1 s and was killed (--hang-seconds); restart 1 of 5" in fleets.said[0].text


@pytest.mark.parametrize("needs", [None, {}, {"GPU": 1.0}], ids=["hangs", "waits for a place", "or for a GPU"])
def test_an_actor_that_hangs_at_its_start_is_killed_and_one_without_a_place_is_not(fleets, killed, monkeypatch, needs):
    is_waiting = needs is not None
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.5)
    monkeypatch.setattr(fleet_module, "WAITING_SECONDS", 0.2)
    with fleets([lambda: killed.go_on.wait(20)], hang_seconds=0.5, in_order=True, at_start=True) as fleet:
        if is_waiting:
            (actor_id,) = place = frozenset([fleet.actors[0].handle._actor_id.hex()])
            fleets.session.state = fleets.session.state._replace(waiting=place)
            if needs:  # half of each of two GPUs is free
                name, _, *rest = fleets.session._started[actor_id]
                fleets.session._started[actor_id] = name, needs, *rest
                free = dict.fromkeys(fleets.session.state.free, needs)
                fleets.session.state = fleets.session.state._replace(free=free)
            waited = time.monotonic() + 1.5
            fleet.take(lambda: time.monotonic() > waited)
            assert (fleet.placed, killed.actors) == (1, [])
            killed.go_on.set()
        take(fleet)
        assert (fleet.placed, fleet.actors[0].starts) == (2, 1 if is_waiting else 2)
    said = ["actor 0 waits for a node", "actor 0 has found a place (pid "] if is_waiting else ["actor 0 sent no heartb"]
    assert all(event.text.startswith(text) for event, text in zip(fleets.said, said, strict=True))
    number = -1 if is_waiting else 0  # in a deterministic run the games of one that waits stay in the count
    assert {event.actor for event in fleets.said} == {number}


def test_a_packed_node_is_filled_before_the_next_one_and_what_has_no_place_is_named():
    a, b, c = (56 * letter for letter in "abc")  # ids as Ray has them
    free = {a: {"CPU": 2.0, "GPU": 1.0}, b: {"CPU": 2.0}, c: {"CPU": 1.0, "GPU": 0.5}}
    state = ClusterState({}, copy.deepcopy(free), free)
    found = [choose("pack", {"CPU": 1.0, "GPU": 0.5}, free).get("scheduling_strategy") for _ in range(4)]
    assert [strategy and strategy.node_id for strategy in found] == [a, a, c, None]
    assert all(strategy.soft for strategy in found[:3])
    assert not state.has_place({"CPU": 1.0, "GPU": 0.5})
    assert state.has_place({"CPU": 1.0})
    assert not state.has_place({"CPU": 1.0}, refused={b})
    has = "2 of 5 CPUs and 0 of 1.5 GPUs are free on 3 nodes"
    assert state.node_with({"CPU": 1.0, "GPU": 0.5}) == f"a node with 1 CPU and 0.5 GPU free; {has}"
    assert state.node_with({"CPU": 3.0, "GPU": 0.0}).endswith(
        " 2 of 5 CPUs are free on 3 nodes, none of which has so much"
    )
    assert choose("spread", {"memory": 2.0**30}, free) == {
        "num_cpus": 0, "memory": 2**30, "scheduling_strategy": "SPREAD",
    }  # fmt: skip
    assert choose("auto", {"CPU": 1.0}, free) == {"num_cpus": 1.0}


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        ((17, "node"), "learner 1 (pid 17) at 127.0.0.1 died"),
        ((17, "other"), "learner 1 (pid 17) at a node that is gone was lost with its node"),
        (None, "learner 1 (pid unknown) died at its start"),
    ],
)
def test_a_trainer_that_is_lost_is_named_also_before_it_has_a_process(session, answer, how):
    found, run = inline_ray.Reference(), inline_ray.Reference()
    for reference, value in ((found, answer), (run, None)):
        reference.set_result(value) if value else reference.set_exception(RayActorError("it died"))
    actor = SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda *_, to=to: to) for name, to in (("find", found), ("run", run))}
    )
    _pipe, end = mp.Pipe(duplex=False)
    process = RayProcess(session, actor, (), end)
    process.join(1.0)
    assert process.exitcode == 1
    assert f"{Child('learner 1', None, '', process=process)} {process.how}" == how


def test_a_shard_without_a_place_is_named_and_not_killed(make_replay, session, tape, monkeypatch):
    monkeypatch.setattr("a3c_mp.cluster.session.WAITING_SECONDS", 0.0)
    monkeypatch.setattr("a3c_mp.cluster.remote_replay.STUCK_SECONDS", 0.0)
    go_on = threading.Event()
    replay = make_replay(lambda number: go_on.wait(20) and shard_of(9), 1)
    needs, total = {"memory": 3.0 * 2**30}, {"node": {"memory": 2.0**30}}
    (key,) = session._started
    session._started[key] = "replay shard 0", needs, (), 0.0
    session.state = session.state._replace(total=total, free=total, waiting=frozenset([key]))
    threading.Timer(0.5, go_on.set).start()
    replay._wait(replay.shards[0], replay.shards[0].sample.remote(1))
    why = "3 GiB of memory free; 1 of 1 GiB of memory are free on 1 node, none of which has so much"
    assert tape.messages == [f"replay shard 0 waits for a node with {why}"]


@pytest.mark.parametrize(("visible", "is_refused"), [("3,1", False), ("0", True)])
def test_the_gpu_that_ray_reserves_is_the_one_that_the_trainer_uses(monkeypatch, visible, is_refused):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    why = r"trainer-gpus=1: Ray has reserved GPU 3 .* net is on GPU 0; start it with CUDA_VISIBLE_DEVICES=3"
    with pytest.raises(ConfigError, match=why) if is_refused else contextlib.nullcontext():
        check_gpu(SimpleNamespace(trainer_gpus=1), "3")


def test_a_node_that_could_do_the_work_before_costs_a_restart(fleets):
    """The port of a simulator is still held there, say."""
    fleets.session.state = ClusterState({"node": "10.0.0.2"})
    with fleets([raising(ConfigError("env-id", "Odd-v0", "its port is in use"))], at_start=True) as fleet:
        for actor in fleet.actors:
            actor.worked_at = "node"
        take(fleet)
    assert fleet.restarts == 1
    (said,) = fleets.said
    assert "cannot work on the node at 10.0.0.2: env-id=Odd-v0: its port is in use" in said.text


@pytest.mark.parametrize("joined_later", [False, True], ids=["at the start", "joined later"])
def test_a_node_that_differs_ends_the_run_at_its_start_and_is_not_used_later(fleets, joined_later):
    fleets.session.state = ClusterState({"node": "10.0.0.2"})
    differs = raising(ConfigError("env-id", "Odd-v0", "its actions are Discrete(3) there, Discrete(2) here"))
    with fleets([differs], at_start=True, in_order=True) as fleet:
        if joined_later:
            fleet._first_nodes = frozenset()
            assert [message.payload[:2] for message in take(fleet)] == [(0, 1), (1, 1)]
        else:
            with pytest.raises(
                ConfigError, match=r"address=10.0.0.2: this node cannot work in this run: env-id=Odd-v0"
            ):
                take_for_ever(fleet)
    said = ["cannot work on the node at 10.0.0.2, which is not used: env-id=Odd-v0: its actions are"] * joined_later
    assert [text in event.text for event, text in zip(fleets.said, said, strict=True)] == [True] * joined_later
    selectors = [options["label_selector"] for options in fleets.session.ray.selectors if "label_selector" in options]
    assert selectors == [{"ray.io/node-id": "!in(node)"}] * joined_later
    assert fleet.restarts == 0


def test_an_actor_compares_its_spaces_with_those_of_the_trainer():
    args, expected = SimpleNamespace(env_id="CartPole-v1", actor_gpus=0.0), (Box(0, 1, (3,), np.float32), Discrete(2))
    check_node(args, probe_env("CartPole-v1"))
    check_node(args, None)
    found = r"env-id=CartPole-v1: its observations are .*\(4,\), float32\) there, .*\(3,\), float32\) here; install the"
    with pytest.raises(ConfigError, match=found):
        check_node(args, expected)


# ---- who may use a cluster


def test_of_the_variables_of_ray_only_those_of_tls_are_kept():
    kept = {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": "file", "PATH": "/bin"}
    assert foreign({**kept, "RAY_ADDRESS": "host:1", "RAY_AUTH_TOKEN": "secret"}) == kept


def test_without_ray_or_with_an_old_one_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'ray=none: it is not installed; pip install "ray==2.60.0"'):
        check_installed()
    monkeypatch.undo()
    check_installed()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.3")
    with pytest.raises(ConfigError, match=r"ray=2\.9\.3: clusters of this version have no tokens; pip install"):
        check_installed()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(access.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def test_tokens_and_addresses_are_for_their_owner_only(home):
    token = access.find_token(None, make=True)
    assert token == home / "ray_token"
    assert home.stat().st_mode & 0o777 == 0o700
    assert access.find_token(None, make=True).read_text() == token.read_text()
    (folder := home / "node").mkdir()
    access.save_address(cluster := ClusterAddress("host:1", str(token)), SimpleNamespace(folder=folder))
    assert token.stat().st_mode & 0o777 == 0o600
    assert access.find_cluster("auto", None) == ("host:1", str(token))
    folder.rmdir()
    assert access.read_address() is None, "the node has ended, or was killed"
    assert access.save_address(cluster, SimpleNamespace(folder=home)) == cluster, "and is replaced"


def test_a_second_cluster_does_not_replace_the_first_ones_address_while_that_answers(home, monkeypatch):
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        first = ClusterAddress(f"127.0.0.1:{server.getsockname()[1]}", "token")
        second, here = ClusterAddress("127.0.0.1:1", "token"), SimpleNamespace(folder=home)
        assert access.save_address(first, here) == first
        assert access.save_address(second, here) == first
        with monkeypatch.context() as patch:
            patch.setattr("socket.gethostname", lambda: "another")  # that has the same home folder
            assert access.read_address() is None
            assert access.save_address(second, here) == second
        assert access.read_address() == first
    assert access.save_address(second, here) == second == access.read_address()
    monkeypatch.setattr("pathlib.Path.write_text", raising(OSError(28, "No space left on device")))
    with pytest.raises(
        ConfigError, match=r"^folder=.*home: it cannot be written \(No space left on device\); make room"
    ):
        access.save_address(second, here)


def make_token(mode):
    return lambda home: access.find_token(None, make=True).chmod(mode)


NOTHING = "nothing answers there; give HOST:PORT of a head"
REFUSED = {
    "head": (lambda home: home.write_text(""), "folder=HOME: it cannot be made (File exists); choose another with the"),
    "status": (lambda home: (home.mkdir(), home.chmod(0o750)), "folder=HOME: other users may use it; chmod go= "),
    "head --host 127.0.0.5": (
        lambda home: None,
        "host=127.0.0.5: Ray listens on all addresses of this machine, not on 127.0.0.5 alone: it can bind one of",
    ),
    "head --host 0.0.0.0": (lambda home: None, "host=0.0.0.0: other nodes cannot connect to it; give an address of"),
    "head --host a..b": (lambda home: None, "host=a..b: it has no IPv4 address ("),
    "head --host 192.0.2.99": (lambda home: None, "host=192.0.2.99: it cannot be bound ([Errno 99]"),
    "head --num-cpus 1 --node-ports 7000 7010": (
        lambda home: None,
        "node-ports=7000 7010: this node needs 18 ports; give a larger range",
    ),
    "head --num-cpus 1 --port 7020 --node-ports 7000 7040": (
        lambda home: None,
        "node-ports=7000 7040: 7020 is the head's own (--port); give a range without it",
    ),
    "head --num-cpus 1 --node-ports 8200 8300": (
        lambda home: None,
        "node-ports=8200 8300: 8265 is that of Ray's dashboard; give a range without it",
    ),
    "head --port 99999": (
        lambda home: None,
        "port=127.0.0.1:99999: it cannot be bound (bind(): port must be 0-65535.)",
    ),
    "join auto": (lambda home: None, "address=auto: this machine has no node of a cluster"),
    "join host:1": (lambda home: None, "token-file=HOME/ray_token: it cannot be read (No such file or directory)"),
    "join host:2": (make_token(0o640), "token-file=HOME/ray_token: other users may use it; chmod go= "),
    "join 127.0.0.1:99999": (make_token(0o600), f"address=127.0.0.1:99999: {NOTHING}"),
    "join 127.0.0.1:1": (make_token(0o600), f"address=127.0.0.1:1: {NOTHING}"),
    "join nowhere": (make_token(0o600), f"address=nowhere: {NOTHING}"),
}


@pytest.mark.parametrize(("arguments", "before", "line"), [(key, *case) for key, case in REFUSED.items()], ids=REFUSED)
def test_a_node_that_cannot_be_started_says_so_in_one_line(home, monkeypatch, capsys, arguments, before, line):
    before(home)
    monkeypatch.setattr(command, "check_installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cluster", *arguments.split()])
    assert command.main() == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"error: {line.replace('HOME', str(home))}")


@pytest.mark.parametrize(("name", "default"), [("head", "loopback only"), ("join", "that from which it connects")])
def test_the_help_of_a_node_names_the_address_that_it_takes(monkeypatch, capsys, name, default):
    monkeypatch.setattr(sys, "argv", ["cluster", name, "--help"])
    with pytest.raises(SystemExit):
        command.main()
    assert f"for other nodes; default: {default}" in " ".join(capsys.readouterr().out.split())


def test_a_user_without_a_home_folder_is_told_to_name_one(monkeypatch):
    line = f"folder=~/.a3c_mp: there is no home folder; .* {access.HOME_VARIABLE}$"
    with monkeypatch.context() as patch:
        for name in ("HOME", access.HOME_VARIABLE):
            patch.delenv(name, raising=False)
        patch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        with pytest.raises(ConfigError, match=line):
            access.home()


SLOW = "import os, time; print(os.getpid(), file=open('started', 'w', 1)); time.sleep(100)"
"""code in which a command takes long"""


def interrupt(scripts, *command):
    """(Exit code, stdout, stderr) of a command after Ctrl-C in `SLOW`."""
    process = scripts.start(*command)
    scripts.wait_until((scripts.runs_dir / "started").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ctrl_c_while_a_node_imports_gives_one_line(scripts):
    (scripts.runs_dir / "numpy.py").write_text(SLOW)  # found before the library
    assert interrupt(scripts, "a3c_mp.cluster", "head") == (130, "", "interrupted\n")


def test_ctrl_c_while_a_node_starts_ends_it_as_later(scripts, home):
    """Also what Ray has started by then, and its folder."""
    (script := scripts.runs_dir / "slow_node.py").write_text(f"""
import sys
from a3c_mp.cluster import __main__ as command, node
node.RAY_START, command.check_installed = {SLOW!r}, lambda: None
sys.exit(command.main())
""")
    assert interrupt(scripts, str(script), "head", "--port", str(free_port())) == (0, "", "")
    assert not psutil.pid_exists(int((scripts.runs_dir / "started").read_text()))
    assert not list(scripts.temporary.iterdir())


def test_fewer_places_than_none_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cluster", "head", "--num-cpus", "-1"])
    with pytest.raises(SystemExit):
        command.main()
    assert "argument --num-cpus: must be 0 or more" in capsys.readouterr().err


def test_a_node_of_another_commit_is_a_warning(monkeypatch, capsys):
    other = {**FREE, "nodes": [{**NODE, "versions": {"commit": "c0ffee"}}]}
    monkeypatch.setattr(access, "_ask", lambda address, settings: CLOSED if "RAY_AUTH_TOKEN" in settings else other)
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        access.check_cluster(ClusterAddress(f"127.0.0.1:{server.getsockname()[1]}", "secret"))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning: address=\S+: its node at 10.0.0.2 has commit c0ffee instead of \S+", line)


CLOSED, PLACE = {"error": "Unauthenticated"}, {"total": {"CPU": 1}, "free": {"CPU": 1}}
NODE = {"address": "10.0.0.2", **PLACE, "versions": {"torch": "1.0"}}
FREE = {"nodes": [{**NODE, "versions": {}}]}
ANSWERS = {
    "open cluster": ((FREE, FREE), "the cluster does not clearly refuse a wrong token: anyone may be able to run"),
    "wrong token": ((CLOSED, CLOSED), "the cluster refuses the token in secret"),
    "silent": ((FREE, {"error": "Deadline"}), "the cluster does not clearly refuse a wrong token"),
    "no head": (({"error": "Deadline"}, CLOSED), "the head does not answer (Deadline)"),
    "no place": (
        ({"nodes": [{**FREE["nodes"][0], "free": {}}]}, CLOSED),
        "an actor needs a node with 1 CPU free; 0 of 1 CPU are free on 1 node; add a node",
    ),
    "other torch": (({**FREE, "nodes": [NODE]}, CLOSED), "its node at 10.0.0.2 has torch 1.0 instead of "),
}


@pytest.mark.parametrize(("answers", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_cluster_that_cannot_be_used_is_refused_in_one_line(monkeypatch, answers, message):
    monkeypatch.setattr(access, "_ask", lambda address, settings: answers["RAY_AUTH_TOKEN" in settings])
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError) as error:
            access.check_cluster(ClusterAddress(address, "secret"), needs={"CPU": 1})
    assert str(error.value).startswith(f"address={address}: {message}")


def test_only_a_cluster_without_a_token_is_joined_without_one(monkeypatch, home):
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        cluster = access.find_cluster(f"127.0.0.1:{server.getsockname()[1]}", None, insecure=True)
        monkeypatch.setattr(access, "_ask", lambda address, settings: FREE)
        assert access.check_cluster(cluster) == FREE["nodes"]
        monkeypatch.setattr(access, "_ask", lambda address, settings: CLOSED)
        with pytest.raises(ConfigError, match="the cluster has a token; leave --insecure-cluster out"):
            access.check_cluster(cluster)


def test_too_little_shared_memory_for_the_object_store_is_found_before_the_start(tmp_path):
    check_store(1, 2, str(tmp_path))
    why = r"num-actors=2: the object store needs [\d,]+ MiB in .* free there; lower it"
    with pytest.raises(ConfigError, match=why):
        check_store(2**60, 2, str(tmp_path))


@pytest.mark.parametrize("options", [[], ["--object-store-memory=1"]], ids=["of a size that is chosen", "of a size"])
def test_without_shared_memory_the_object_store_lies_in_a_temporary_folder(monkeypatch, options):
    commands = []
    monkeypatch.setattr("os.access", lambda path, mode: path == "/tmp")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/var/lib/some/job/of/a/scheduler")  # too long for sockets
    kept = SimpleNamespace(stdout=None)
    popen = SimpleNamespace(Popen=lambda command, **settings: commands.append(command) or kept, PIPE=-1, DEVNULL=-3)
    monkeypatch.setattr(node, "subprocess", popen)
    os.close((made := Node(options, {}))._pipe)
    made.folder.rmdir()
    assert made.folder.parent == Path("/tmp")
    assert "--plasma-directory=/tmp" in commands[0]
    assert sum(str(part).startswith("--object-store-memory=") for part in commands[0]) == 1


def test_a_node_that_the_head_cannot_reach_says_so(ray_node, home, monkeypatch, capsys):
    (logs := ray_node.folder / "ray/session_latest/logs").mkdir(parents=True)
    (logs / "raylet.out").write_text("it has mistakenly been marked as dead by the GCS: GCS failed to check the health")
    monkeypatch.setattr(command, "Node", lambda options, settings: ray_node)
    monkeypatch.setattr(ray_node, "wait_for_start", lambda: None)
    (raylet,) = psutil.Process(ray_node._guardian.pid).children()
    raylet.kill()
    args = argparse.Namespace(num_cpus=1, num_gpus=None, node_ports=(7000, 7050))
    with pytest.raises(ConfigError, match=r"host=10.0.0.2: the head cannot connect to this node there and has given"):
        command.run_node(args, ClusterAddress("10.0.0.1:1", "token"), "10.0.0.2", [], "joined")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: Ray listens on all addresses of this machine, not on 10.0.0.2 alone: close TCP 7000 to"
    )


# ---- nodes


@pytest.fixture
def ray_node(monkeypatch, tmp_path):
    """A node of one process, which `ray start` leaves behind: `sleep`, by the name of one of Ray's main processes."""
    (raylet := tmp_path / "raylet").symlink_to(shutil.which("sleep"))
    monkeypatch.setattr(node, "RAY_START", f"import subprocess; subprocess.Popen(['{raylet}', '100'])")
    (folder := (ray_node := Node([], {})).folder / "ray").mkdir()
    (folder / "ray_current_cluster").write_text("host:1")
    assert ray_node.wait_for_start() == "host:1"
    yield ray_node
    if folder.exists():
        ray_node.close()


@pytest.mark.parametrize("how", ["killed", "closed", "guardian killed", "guardian stopped"])
def test_a_node_ends_with_its_parent_and_leaves_nothing(ray_node, how, monkeypatch):
    monkeypatch.setattr(node, "END_SECONDS", 0.5 if how == "guardian stopped" else node.END_SECONDS)
    parent = psutil.Process(ray_node._guardian.pid)
    (raylet,) = parent.children()
    if how == "killed":
        os.close(ray_node._pipe)  # as the kernel does
        parent.wait(20)
    else:
        {"closed": lambda: None, "guardian killed": parent.kill, "guardian stopped": parent.suspend}[how]()
        ray_node.close()
    assert not ray_node.folder.exists()
    psutil.wait_procs([raylet], 5)  # where the guardian does not wait for it
    assert not still_alive([parent, raylet])


def test_the_processes_of_a_node_yield_to_a_trainer_in_another_session(ray_node):
    (raylet,) = psutil.Process(ray_node._guardian.pid).children()
    if not (group := Path(f"/proc/{raylet.pid}/autogroup")).exists():
        pytest.skip("this kernel has no autogroups")
    assert group.read_text().split()[-1] == str(guardian.NICENESS)


def test_the_end_of_a_main_process_is_noticed(ray_node):
    assert not ray_node.has_ended(0.0)
    (raylet,) = psutil.Process(ray_node._guardian.pid).children()
    raylet.kill()
    assert ray_node.has_ended(20.0)


def test_a_node_that_cannot_be_started_is_a_line_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(node, "RAY_START", "import sys; sys.exit('no memory')")
    failed = Node([], {})
    with pytest.raises(ConfigError, match=r"node: Ray cannot be started here \(no memory\)"):
        failed.wait_for_start()
    failed.close()
    assert not failed.folder.exists()


def test_a_node_whose_process_the_machine_refuses_is_a_line_and_leaves_nothing(monkeypatch, tmp_path):
    def refuse(*args, **settings):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    node.labels()  # they are kept, and found by a process
    monkeypatch.setattr(node.subprocess, "Popen", refuse)
    monkeypatch.setattr(node, "root_for_sockets", lambda longest: str(tmp_path))
    gc.collect()  # of what earlier tests have left open
    files = os.listdir("/proc/self/fd")
    with pytest.raises(
        ConfigError, match=r"^node: Ray cannot be started here \(Resource temporarily unavailable\); raise"
    ):
        Node([], {})
    assert (os.listdir("/proc/self/fd"), os.listdir(tmp_path)) == (files, [])


@pytest.mark.parametrize("end", ["after some time", "by a second signal"])
def test_a_node_that_is_ended_by_a_signal_waits_for_the_runs_on_it(ray_node, monkeypatch, capsys, end):
    assert not ray_node.is_used()
    code = "file = open('log', 'w'); input()"  # a file of the node's folder, as a trainer has
    with subprocess.Popen([sys.executable, "-c", code], cwd=ray_node.folder, stdin=subprocess.PIPE):
        until(ray_node.is_used)
        monkeypatch.setattr(command, "GRACE_SECONDS", 0.5 if end == "after some time" else 60.0)
        pause = time.sleep if end == "after some time" else lambda seconds: sys.exit(0)
        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        began = time.monotonic()
        with contextlib.suppress(SystemExit):
            command.wait_for_runs(ray_node)
        assert time.monotonic() - began < 20
    assert capsys.readouterr().err.startswith("a run uses this node: stop it; the node ends in ")
