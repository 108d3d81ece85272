"""Parts of chapter 7 without Ray, or with Ray as threads of this process."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import inline_ray
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import ROOT, default_signals
from inline_ray import ObjectLostError, RayActorError
from torch import nn

from a3c_mp.cluster import __main__ as nodes
from a3c_mp.cluster import access
from a3c_mp.cluster.environment import ClusterAddress, check_installed, foreign
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.guardian import Guardian, command_line, has_open
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.remote_replay import RemoteReplay
from a3c_mp.cluster.session import Session, check_store
from a3c_mp.cluster.shards import CONTINUED, Outbox, ReplayShard, ReplaySpec, Reply
from a3c_mp.cluster.transport import Packer
from a3c_mp.cluster.watchdog import ClusterState
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.pool import WorkerOptions
from a3c_mp.replay import EnvStep, Writer

FRAME = (3, 2)


# ---- transport


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
    sent = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    sent["terminated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["truncated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["obs"][:] = torch.from_numpy(stacks(rng, (sent["terminated"] | sent["truncated"]).numpy()))
    sent["reward"].normal_()
    packed = (packer := Packer(spec, stack=4)).pack(sent)
    packed.flags.writeable = False  # as in the object store
    packer.unpack(packed, received := {name: torch.ones_like(field) for name, field in sent.items()})
    assert all(torch.equal(received[name], sent[name]) for name in spec)
    obs_bytes = sent["obs"].numel()
    assert (packer.nbytes - Packer(spec).nbytes + obs_bytes) / obs_bytes < 0.3


# ---- replay shards


SPEC = ReplaySpec(num_envs=2, obs_space=Box(-9, 9, (1,), np.float32), action_space=Discrete(5), stack=1)
SETTINGS = (1, 40, 0.5, 7)
"""of a shard: actors, rows, priority exponent, seed"""


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


def contents(replay):
    """What can be drawn: leaves and the rows behind them."""
    leaves = replay.tree.leaves.copy()
    drawn = np.flatnonzero(leaves)
    fields = {name: field[torch.from_numpy(drawn)].numpy() for name, field in replay.fields.items()}
    return leaves, {name: field.tolist() for name, field in fields.items() if name != "priority"}


@pytest.mark.parametrize("blocks", [2, 9])
def test_a_shard_holds_what_a_shared_memory_of_the_same_size_would(blocks):
    shard, local = ReplayShard(SPEC, *SETTINGS), ReplayShard(SPEC, *SETTINGS).replay
    outbox = Outbox(SPEC, 5, 3)
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
    assert shard.reply().size == np.count_nonzero(theirs[0]) >= np.count_nonzero(kept) > 10


def test_a_successor_drops_or_continues_what_was_incomplete():
    whole, cut, continued = (ReplayShard(SPEC, *SETTINGS) for _ in range(3))
    for shard, restored in ((whole, None), (cut, False), (continued, True)):
        outbox = Outbox(SPEC, 8, 3)
        acting = Acting(outbox.ring, 2)
        acting.steps(4)
        shard.insert(0, outbox.take())
        if restored is not None:  # another process
            successor_state = (
                {name: field.copy() for name, field in acting.writer.fields().items()} if restored else None
            )
            outbox = Outbox(SPEC, 8, 3, successor_state and SimpleNamespace(successor_state=successor_state))
            rng, acting = acting.rng, Acting(outbox.ring, 2, successor_state)
            acting.rng = rng
        acting.steps(4)
        shard.insert(0, outbox.take())
    assert np.array_equal(whole.replay.tree.leaves, continued.replay.tree.leaves)
    assert contents(whole.replay)[1] == contents(continued.replay)[1]
    assert cut.replay.size < whole.replay.size


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
    batch = shard.sample(64).batch
    newest = batch["obs"][:, -1, 0, 0]
    assert set(newest.tolist()) <= set(range(14, 20)), "rows 11 to 13 have no whole stack here"
    assert (batch["obs"][:, 0, 0, 0] == newest - 3).all()


# ---- sessions, on threads


@pytest.fixture
def session(monkeypatch, log):
    """A session whose Ray are threads of this process."""
    ray = inline_ray.install(monkeypatch)
    session = Session(None, None, log)
    session.watchdog.state = ClusterState({"node": "127.0.0.1"}, 1.0, 0.0, {}, frozenset())
    session.kill_process = lambda node_id, pid: None
    yield session
    ray.shutdown()


def until(happened, workers=None, seconds=20):
    """Wait for something, while a fleet looks after its actors."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        if workers is not None:
            workers.poll(lambda: False)
        time.sleep(0.01)


def test_three_shards_are_sampled_as_one(session):
    """Chi-square over 100,000 draws in proportion to priority, with shards of different sizes and sums."""
    shards = [ReplayShard(SPEC, 1, 40, 1.0, seed) for seed in range(3)]
    for number, shard in enumerate(shards):
        outbox = Outbox(SPEC, 30, 3)
        Acting(outbox.ring, number).steps(5 + 5 * number)
        shard.insert(0, outbox.take())
    handles = [session.start_actor(lambda shard=shard: shard, ()) for shard in shards]
    replay = RemoteReplay(
        session, lambda number: handles[number], 3, 3, batch_size=500, ahead=0, seed=1, max_restarts=0,
        should_stop=lambda: False, device=torch.device("cpu"),
    )  # fmt: skip
    for number, shard in enumerate(shards):
        replay.sizes[number], replay.totals[number] = shard.reply()[:2]
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


def test_a_batch_with_a_part_of_a_shard_that_was_replaced_is_not_used(session):
    def start_shard(number):
        shard, outbox = ReplayShard(SPEC, 1, 40, 1.0, seed=number), Outbox(SPEC, 30, 3)
        Acting(outbox.ring, number).steps(9)
        shard.insert(0, outbox.take())
        return session.start_actor(lambda: shard, ())

    replay = RemoteReplay(
        session, start_shard, 2, 2, batch_size=50, ahead=0, seed=1, max_restarts=1,
        should_stop=lambda: False, device=torch.device("cpu"),
    )  # fmt: skip
    replay.totals[:] = 1.0
    first, second = replay._request()
    assert replay._gather([first, second]) is not None
    first, second = replay._request()
    wait, waits = replay._wait, iter([False, True])

    def replaced_meanwhile(call):
        if next(waits):
            replay._replace(0, "killed")
        return wait(call)

    replay._wait = replaced_meanwhile
    assert replay._gather([first, second]) is None


def test_weights_arrive_in_the_version_that_is_asked_for_also_from_a_second_server(session, tape):
    net, copy = nn.Linear(2, 3), nn.Linear(2, 3)
    publisher = Publisher(session, net)
    reader = Reader(torch.float32)
    assert reader.load(copy) == 0
    older = net.weight.detach().clone()
    with torch.no_grad():
        net.weight += 1
    assert publisher.publish(net) == 1
    assert reader.load(copy, exact=0) == 0
    assert torch.equal(copy.weight, older)
    assert reader.load(copy, exact=1) == 1
    assert torch.equal(copy.weight, net.weight)

    session.ray.kill(session.ray.get_actor("parameter-server"))
    assert reader.load(copy) == 1, "it goes on with the weights that it has"
    assert publisher.publish(net) == 2
    until(lambda: publisher.look_after() or tape.messages)
    until(lambda: publisher.look_after() or not publisher._sent)
    assert reader.load(copy, exact=2) == 2
    assert tape.messages == ["the parameter server died; another one is started"]


def test_helpers_that_do_not_answer_are_killed_and_others_are_not(session, monkeypatch):
    killed, handle = [], SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "id"))
    session.kill_process = lambda node_id, pid: killed.append((node_id, pid))
    session.end_if_stuck(handle, time.monotonic() - 100)
    assert not killed, "it has no process yet"
    session.state.places["id"] = ("node", 7)
    session.end_if_stuck(handle, time.monotonic())
    assert not killed
    session.end_if_stuck(handle, time.monotonic() - 100)
    assert not killed, "it has not answered yet: it may still be starting"
    session.note_answer(handle)
    session.end_if_stuck(handle, time.monotonic() - 100)
    assert killed == [("node", 7)]


class StuckShards:
    """Makes shards of which the first is stuck in its second insertion, until it is killed."""

    def __init__(self, session):
        self.session, self.stopped, self.started = session, threading.Event(), []
        session.kill_process = lambda node_id, pid: self.stopped.set()

    def __call__(self, number):
        self.started.append(actor := self.session.start_actor(StuckShard, (self, not self.started)))
        self.session.state.places[actor._actor_id.hex()] = ("node", 7)
        return actor

    def __deepcopy__(self, memo):
        return self  # its actors are threads


class StuckShard:
    def __init__(self, shards, is_stuck):
        self.shards, self.is_stuck = shards, is_stuck

    def insert(self, actor, rows):
        if self.is_stuck and rows != "first":
            self.shards.stopped.wait(20)
            raise RayActorError("it was killed")
        return Reply(len(rows), 1.0)


def remote_replay(session, start, ahead=0, should_stop=lambda: False):
    """The replay of an actor, in a shard."""
    return RemoteReplay(
        session, start, 1, 1, batch_size=1, ahead=ahead, seed=1, max_restarts=1, should_stop=should_stop,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_a_stuck_shard_does_not_hang_a_trainer_that_waits_for_an_insertion(session, monkeypatch):
    """In deterministic runs, which wait for each; it is killed, and an empty one takes its place."""
    replay = remote_replay(session, shards := StuckShards(session))
    replay.insert(0, "first")
    assert replay.size == 5
    monkeypatch.setattr("a3c_mp.cluster.session.STUCK_ACTOR_SECONDS", 0.2)
    replay.insert(0, "second")
    assert (replay.size, len(shards.started)) == (0, 2)


def test_insertions_wait_for_a_shard_that_does_not_answer(session, monkeypatch):
    """Otherwise their rows would fill the object store; after some time the shard is replaced."""
    is_over = []
    replay = remote_replay(session, shards := StuckShards(session), ahead=1, should_stop=lambda: bool(is_over))
    replay.insert(0, "first")
    until(lambda: replay.look_after() or replay.size)
    for rows in ("second", "third"):
        replay.insert(0, rows)
    threading.Timer(0.5, is_over.append, ["a signal"]).start()
    replay.insert(0, "fourth")
    assert is_over, "two wait for their answer already"
    assert len(shards.started) == 1

    is_over.clear()
    monkeypatch.setattr("a3c_mp.cluster.session.STUCK_ACTOR_SECONDS", 0.2)
    replay.insert(0, "of the other shard")
    until(lambda: replay.look_after() or replay.size)
    assert (replay.size, len(shards.started)) == (len("of the other shard"), 2)


def test_the_watchdog_saves_a_run_only_while_the_trainer_is_in_a_call_of_ray(session, monkeypatch):
    dog = session.watchdog
    for name in ("POLL", "ANSWER", "SILENT", "STUCK"):
        monkeypatch.setattr(f"a3c_mp.cluster.watchdog.{name}_SECONDS", 0.02)
    looks, saved, codes, answer = [], [], [], Future()
    monkeypatch.setattr("a3c_mp.cluster.watchdog.os._exit", lambda code: (codes.append(code), dog._stopping.set()))
    dog._update = lambda: 1 / 0
    stopping_wait = dog._stopping.wait
    dog._stopping.wait = lambda seconds: (looks.append(dog.lost), stopping_wait(seconds))[1]
    dog.on_stuck = lambda why: (saved.append(why), answer.set_result(None), 143)[-1]
    watchdog = threading.Thread(target=dog._watch, daemon=True)
    watchdog.start()
    until(lambda: sum(map(bool, looks)) > 5)  # looks at the trainer, after the head was lost
    assert not saved
    with pytest.raises(WorkerError, match="the head of the Ray cluster has not answered"):
        session.check()
    session.ray.get(answer)
    watchdog.join(20)
    assert len(saved) == 1
    assert codes == [143]


def test_a_head_that_is_slow_but_there_has_more_time(session, monkeypatch):
    dog, busy_seconds = session.watchdog, 0.5
    for name, seconds in {"POLL": 0.01, "SILENT": 0.02, "BUSY": busy_seconds}.items():
        monkeypatch.setattr(f"a3c_mp.cluster.watchdog.{name}_SECONDS", seconds)
    dog._update, dog._end_if_trainer_is_stuck = lambda: 1 / 0, lambda why: None
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        dog.start(f"127.0.0.1:{server.getsockname()[1]}")
        until(lambda: dog.lost)
        assert time.monotonic() - began >= busy_seconds
    assert dog.lost.endswith("has not answered for 0 s")
    dog._thread.join(20)


@pytest.mark.parametrize("how", ["in time", "not in time", "without the head"])
def test_where_rays_shutdown_does_not_return_the_guardian_cleans_up(session, monkeypatch, how):
    """Nor does the interpreter wait for it again."""
    go_on, tape, ray = threading.Event(), [], sys.modules["ray"]
    monkeypatch.setattr(ray, "shutdown", (lambda: None) if how == "in time" else (lambda: go_on.wait(20)))
    monkeypatch.setattr("a3c_mp.cluster.session.atexit.unregister", lambda function: tape.append(function))
    monkeypatch.setattr("a3c_mp.cluster.session._working", working := [])
    for name in ("SHUTDOWN", "LOST"):
        monkeypatch.setattr(f"a3c_mp.cluster.session.{name}_SECONDS", 20.0 if how == "in time" else 0.1)
    session.watchdog.lost = "it is silent" if how == "without the head" else None
    guardian = SimpleNamespace(close=lambda: tape.append("closed"))
    session._cleanup.callback(session._dismiss, guardian)
    session._cleanup.callback(session._shut_down)
    session.__exit__()
    go_on.set()
    if how == "in time":
        assert (tape, working) == (["closed"], [])
    else:
        assert (tape, working) == ([ray.shutdown], [guardian])


def test_of_the_variables_of_ray_only_those_of_tls_are_kept():
    kept = {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": "file", "PATH": "/bin"}
    assert foreign({**kept, "RAY_ADDRESS": "host:1", "RAY_AUTH_TOKEN": "secret"}) == kept


def test_without_ray_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'ray=none: it is not installed; pip install "ray==2.60.0"'):
        check_installed()


# ---- fleets


class Counting:
    """An actor's target: it returns its number, how often it was called, and the token."""

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
        return (self.channel.actor, self.calls, token), None


def raising(error):
    def mishap():
        raise error

    return mishap


class Mishaps(list):
    """What happens to the processes of actor 0, one after the other; they share it."""

    def __deepcopy__(self, memo):
        return self


class Fleets:
    """Makes fleets of two actors on threads; what is said of restarts is in `said`."""

    def __init__(self, session):
        self.session, self.said = session, []

    def __call__(self, mishaps, at_start=False, **options):
        shared = Mishaps(mishaps)
        states = SimpleNamespace(start=0, record_start=lambda actor: None, forget=lambda actor: None)
        store = SimpleNamespace(write=lambda slot, result, rows_ref: result)
        settings = WorkerOptions(**{"role": "actor", "slots_per_worker": 1, "niceness": 0, **options})
        return Fleet(
            self.session, Counting, (shared, at_start), store, 2, states=states, options=settings,
            on_restart=self.said.append,
        )  # fmt: skip


@pytest.fixture
def fleets(session):
    return Fleets(session)


def take_for_ever(fleet):
    while True:
        fleet.release(fleet.take(lambda: False), 1)


def test_a_fleet_gives_rounds_as_workers_do(fleets):
    with fleets([], in_order=True) as fleet:
        for number in range(1, 6):
            filled = fleet.take(lambda: False)
            assert [(message.worker, message.payload[:2]) for message in filled] == [(0, (0, number)), (1, (1, number))]
            fleet.release(filled, number)
        assert fleet.take(lambda: True) == []
    assert not fleets.said


def test_rollouts_of_an_actor_count_in_their_order_even_if_a_later_one_arrives_first(fleets, monkeypatch):
    with fleets([], slots_per_worker=2, in_order=True) as fleet:
        first, wait, waits = next(iter(fleet.actors[0].calls)), fleet.session.ray.wait, itertools.count()

        def late(references, **options):
            """As if the first result were still on its way for the first few looks."""
            arrived = [ref for ref in references if ref is not first or next(waits) > 5]
            return wait(arrived, **options) if arrived else ([], references)

        monkeypatch.setattr(fleet.session.ray, "wait", late)
        slots = [slot for _ in range(2) for _, slot, _ in fleet.take(lambda: False)]
    assert slots == [0, 2, 1, 3]


def test_a_round_is_smaller_while_an_actor_has_no_place(fleets):
    with fleets([]) as fleet:
        fleet.release(fleet.take(lambda: False, 2), 1)
        fleet.actors[1].is_waiting = True
        filled = fleet.take(lambda: False, 2)
        assert len(filled) == 1
        fleet.release(filled, 2)
        fleet.actors[1].is_waiting = False
        assert len(fleet.take(lambda: False, 2)) == 2


@pytest.mark.parametrize(
    ("mishap", "said"),
    [
        (raising(ArithmeticError("lost")), "actor 0 (pid {pid}) raised an exception; restart 1 of 1"),
        (raising(RayActorError("the worker died")), "actor 0 (pid {pid}) died; restart 1 of 1"),
        (raising(RayActorError("its node has died")), "actor 0 (pid {pid}) was lost with its node"),
    ],
    ids=["exception", "death", "node"],
)
def test_a_lost_actor_is_replaced_and_fills_its_slot_again(fleets, mishap, said):
    with fleets([mishap], max_restarts=1, in_order=True) as fleet:
        fleet.release(first := fleet.take(lambda: False), 1)
        second = fleet.take(lambda: False)
    assert [message.payload[1] for message in first] == [1, 1]
    assert [message.payload[1] for message in second] == [1, 2], "a new process, and the one that was there"
    assert second[0].payload[2].version == 1
    (message,) = fleets.said
    assert message.text.splitlines()[0] == said.format(pid=os.getpid())
    assert message.replaced
    assert fleet.restarts == ("node" not in said)


@pytest.mark.parametrize("news", ["before", "after", "never"])
def test_results_that_are_lost_with_a_node_cost_no_restart(fleets, monkeypatch, news):
    """Large results lie on the actor's node: Ray says that they are lost, and not why."""
    gone = fleets.session.state.nodes.clear

    def mishap():
        if news == "before":
            gone()
        elif news == "after":
            threading.Timer(0.3, gone).start()
        raise ObjectLostError("all copies of 0123 are lost")

    if news == "never":
        monkeypatch.setattr("a3c_mp.cluster.session.NEWS_SECONDS", 0.3)
    with fleets([mishap], max_restarts=1, in_order=True) as fleet:
        fleet.release(fleet.take(lambda: False), 1)
        fleet.take(lambda: False)
    how = "died; restart 1 of 1" if news == "never" else "was lost with its node"
    assert [message.text for message in fleets.said] == [f"actor 0 (pid {os.getpid()}) {how}"]
    assert fleet.restarts == (news == "never")


def test_the_budget_of_restarts_is_kept(fleets):
    died = raising(RayActorError("the worker died"))
    with fleets([died, died], max_restarts=1) as fleet:
        with pytest.raises(WorkerError, match=r"actor 0 \(pid \d+\) died; restart budget of 1 spent"):
            take_for_ever(fleet)
        assert len(fleets.said) == 1


def test_an_exception_before_the_first_result_is_final(fleets):
    message = r"(?s)actor 0 failed before its first result:.*no coin"
    mishap = raising(ArithmeticError("no coin"))
    with fleets([mishap], at_start=True) as fleet, pytest.raises(WorkerError, match=message):
        take_for_ever(fleet)


def test_an_actor_without_heartbeats_is_killed_and_one_that_is_idle_is_not(fleets, monkeypatch):
    killed = []
    monkeypatch.setattr("a3c_mp.cluster.fleet.BEAT_SECONDS", 0.05)
    fleets.session.kill_process = lambda node_id, pid: killed.append(node_id)
    with fleets([lambda: time.sleep(3)], hang_seconds=1.0, in_order=True) as fleet:
        filled = fleet.take(lambda: False)
        idle_until = time.monotonic() + 1.5
        until(lambda: time.monotonic() > idle_until, fleet)
        assert not killed
        fleet.release(filled, 1)
        fleet.take(lambda: False)
    assert killed == ["node"]
    assert "sent no heartbeat for 1 s and was killed (--hang-seconds); restart 1 of 5" in fleets.said[0].text


def test_an_actor_that_hangs_while_it_starts_is_killed_where_the_head_says_it_is(fleets, monkeypatch):
    killed, go_on, session = [], threading.Event(), fleets.session
    monkeypatch.setattr("a3c_mp.cluster.fleet.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("a3c_mp.cluster.fleet.START_SECONDS", 0.5)
    session.kill_process = lambda *place: (killed.append(place), go_on.set())
    with fleets([lambda: go_on.wait(20)], hang_seconds=0.5, in_order=True, at_start=True) as fleet:
        session.state.places[fleet.actors[0].handle._actor_id.hex()] = ("node", 7)
        fleet.take(lambda: False)
        assert fleet.actors[0].starts == 2
    assert killed == [("node", 7)]
    assert "actor 0 sent no heartbeat" in fleets.said[0].text


# ---- who may use a cluster


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(access.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def test_tokens_and_addresses_are_for_their_owner_only(home):
    token = access.make_token(None)
    assert token == home / "ray_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert access.make_token(None).read_text() == token.read_text()
    with access.saved_address(ClusterAddress("host:1", str(token))):
        assert access.find_cluster("auto", None) == ("host:1", str(token))
    assert list(home.iterdir()) == [token]


HOMES = {
    "no folder": (
        lambda home: home.write_text(""),
        "it cannot be made (File exists); choose another with the environm",
    ),
    "open": (lambda home: (home.mkdir(), home.chmod(0o750)), "other users may use it; chmod 700 "),
}


@pytest.mark.parametrize(("make", "message"), HOMES.values(), ids=HOMES)
def test_a_folder_of_tokens_that_cannot_be_used_is_refused_in_one_line(home, monkeypatch, capsys, make, message):
    make(home)
    monkeypatch.setattr(nodes, "check_installed", lambda: None)
    for arguments in (["head"], ["join", "host:1"], ["status"]):
        monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
        assert nodes.main() == 2
        assert capsys.readouterr().err.startswith(f"error: folder={home}: {message}")


def test_an_address_that_cannot_be_saved_is_a_line(home, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(access, "write_private", full)
    message = f"folder={home}: it cannot be written (No space left on device)"
    with pytest.raises(ConfigError, match=re.escape(message)), access.saved_address(ClusterAddress("host:1", "token")):
        pass


def test_a_head_that_ends_leaves_the_address_of_a_later_one(home):
    with contextlib.ExitStack() as later:
        with access.saved_address(ClusterAddress("host:1", "token")):
            later.enter_context(access.saved_address(ClusterAddress("host:2", "token")))
        assert access._saved_address().address == "host:2"


def test_the_address_that_a_killed_head_has_left_is_not_live(home):
    assert not access.has_live_address()
    server = access.socket.create_server(("127.0.0.1", 0))
    with access.saved_address(ClusterAddress(f"127.0.0.1:{server.getsockname()[1]}", "secret")):
        assert access.has_live_address()
        server.close()
        assert not access.has_live_address()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["head", "--port", "99999"], "error: port=99999: must be between 1 and 65535"),
        (["join", "auto"], "error: address=auto: must be HOST:PORT of the head"),
        (["join", "127.0.0.1:99999"], "error: address=127.0.0.1:99999: must be HOST:PORT"),
    ],
)
def test_a_node_that_cannot_be_started_says_so_in_one_line(home, monkeypatch, capsys, arguments, line):
    access.make_token(None)
    monkeypatch.setattr(nodes, "check_installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
    assert nodes.main() == 2
    said = capsys.readouterr()
    assert said.err.startswith(line)
    assert (said.out, said.err.count("\n")) == ("", 1)


SLOW = "import os, time; print(os.getpid(), file=open('started', 'w', 1)); time.sleep(100)"
"""code in which a command takes long"""


def interrupted(folder, *command):
    """(Exit code, stdout, stderr) of a command after Ctrl-C in `SLOW`."""
    env = {**os.environ, access.HOME_VARIABLE: str(folder / "home"), "TMPDIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=default_signals,  # the tests may have been started with SIGINT ignored
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or (folder / "started").exists(), seconds=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def test_ctrl_c_while_a_node_imports_gives_one_line(tmp_path):
    (tmp_path / "numpy.py").write_text(SLOW)  # found before the library
    assert interrupted(tmp_path, "-m", "a3c_mp.cluster", "head") == (130, "", "interrupted\n")


def test_ctrl_c_while_a_node_starts_ends_it_as_later(tmp_path):
    """Also what Ray has started by then, and its folder."""
    code = f"""
import sys
from a3c_mp.cluster import __main__ as nodes
nodes.RAY, nodes.check_installed = {SLOW!r}, lambda: None
sys.exit(nodes.main())
"""
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    assert interrupted(tmp_path, "-c", code, "head", "--port", port) == (0, "", "")
    assert not command_line(int((tmp_path / "started").read_text()))
    assert {path.name for path in tmp_path.iterdir()} == {"home", "started"}


def write_token(home, text="secret", mode=0o600):
    path = access.home() / "ray_token"
    path.write_text(text)
    path.chmod(mode)


TOKENS = {
    "no token": (lambda home: None, "it cannot be read (No such file or directory)"),
    "open": (lambda home: write_token(home, mode=0o640), "other users may read it; chmod 600"),
    "empty": (lambda home: write_token(home, text=""), "it is empty"),
}


@pytest.mark.parametrize(("make", "message"), TOKENS.values(), ids=TOKENS)
def test_a_token_file_that_cannot_be_used_is_refused(home, make, message):
    make(home)
    with pytest.raises(ConfigError) as error:
        access.find_cluster("host:1", None)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="address=auto: this machine has no node of a cluster"):
        access.find_cluster("auto", None)


CLOSED, FREE = {"error": "Unauthenticated"}, {"versions": {}, "free_cpus": 1, "nodes": []}
ANSWERS = {
    "open cluster": ((FREE, FREE), "the cluster accepts any token: everybody can run code on it"),
    "wrong token": ((CLOSED, CLOSED), "the cluster refuses the token in secret"),
    "silent": ((FREE, {"error": "Deadline"}), "cannot tell whether the cluster checks tokens (Deadline)"),
    "no head": (({"error": "Deadline"}, CLOSED), "the head does not answer (Deadline)"),
    "no place": (({**FREE, "free_cpus": 0}, CLOSED), "num-actors=2: the cluster at "),
    "other torch": (({**FREE, "versions": {"torch": "1.0"}}, CLOSED), "its head has torch 1.0, here "),
}


@pytest.mark.parametrize(("answers", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_cluster_that_cannot_be_used_is_refused_in_one_line(monkeypatch, answers, message):
    answers = [json.loads(json.dumps(answer)) for answer in answers]
    monkeypatch.setattr(access, "_ask", lambda address, settings: answers.pop(0))
    monkeypatch.setattr(access, "_answer", lambda answer: answer)
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError) as error:
            access.check_cluster(ClusterAddress(address, "secret"), num_actors=2)
    assert message in str(error.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "host:port"])
def test_an_address_where_nothing_answers_is_refused(address):
    with pytest.raises(ConfigError, match=f"address={address}: "):
        access.check_cluster(ClusterAddress(address, "secret"))


def test_too_little_shared_memory_for_the_object_store_is_found_before_the_start(tmp_path):
    check_store(1, 2, str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"num-actors=2: the object store needs [\d,]+ MiB in .* free there; lower it"
    ):
        check_store(2**60, 2, str(tmp_path))


# ---- what uses a cluster's folder


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "ray").mkdir()
    return folder


@pytest.fixture
def sleeper(folder):
    """A process that has a file of the folder open."""
    code = "import time; file = open('ray/log', 'w'); time.sleep(100)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], cwd=folder.parent)
    until(lambda: has_open(sleeper.pid, folder))
    yield sleeper
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("end", ["of the run", "of its time", "by a second signal"])
def test_a_node_that_is_ended_by_a_signal_waits_for_the_runs_on_it(folder, sleeper, monkeypatch, capsys, end):
    node = nodes.Node([], "127.0.0.1", 0, {}, folder)
    monkeypatch.setattr(node, "_family", list)  # nothing that this process has started is the node's
    monkeypatch.setattr(nodes, "GRACE_SECONDS", 0.5 if end == "of its time" else 60.0)
    happens = {
        "of the run": lambda: (sleeper.kill(), sleeper.wait()),
        "of its time": lambda: None,
        "by a second signal": lambda: node._on_signal(15, None),
    }
    node._on_signal(15, None)
    began = time.monotonic()
    (timer := threading.Timer(0.5, happens[end])).start()
    assert node.wait() == 0
    timer.join()
    assert 0.5 <= time.monotonic() - began < 30
    assert "a run uses this node: stop it; the node ends in " in capsys.readouterr().err


def test_a_node_without_runs_ends_at_a_signal(folder, monkeypatch, capsys):
    node = nodes.Node([], "127.0.0.1", 0, {}, folder)
    monkeypatch.setattr(node, "_family", list)
    node._on_signal(15, None)
    assert node.wait() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
def test_the_guardian_cleans_up_behind_a_parent_that_was_killed(folder, sleeper, is_killed):
    guardian = Guardian(folder)
    if is_killed:
        guardian._process.stdin.close()
        assert sleeper.wait(20) == -9
        guardian._process.wait(20)
        assert not folder.exists()
    else:
        guardian.close()
        assert sleeper.poll() is None
        assert folder.exists()
