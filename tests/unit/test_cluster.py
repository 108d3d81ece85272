"""Parts of chapter 7 without Ray, or with Ray as threads of this process."""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import inline_ray
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import ROOT, default_signals
from inline_ray import ActorUnavailableError, ObjectLostError, RayActorError
from torch import nn

from a3c_mp.algorithms.ray_trainer import check_store
from a3c_mp.cluster import __main__ as command
from a3c_mp.cluster import access, node
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.node import ClusterAddress, Node, check_installed, foreign
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.ray_worker import Packer
from a3c_mp.cluster.remote_replay import RemoteReplay
from a3c_mp.cluster.session import ClusterState, Session
from a3c_mp.cluster.shards import CONTINUED, Outbox, ReplayShard, ReplaySpec, Reply
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.errors import ConfigError, Stopped, WorkerError
from a3c_mp.processes.pool import WorkerOptions
from a3c_mp.replay import EnvStep, Writer

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
    sent = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    sent["terminated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["truncated"][:] = torch.from_numpy(rng.random((20, 3)) < share / 2)
    sent["obs"][:] = torch.from_numpy(stacks(rng, (sent["terminated"] | sent["truncated"]).numpy()))
    sent["reward"].normal_()
    packed = (packer := Packer(spec, stack=4)).pack(sent)
    packer.unpack(packed, received := {name: torch.ones_like(field) for name, field in sent.items()})
    assert all(torch.equal(received[name], sent[name]) for name in spec)
    assert sum(field.nbytes for field in packed.values()) == packer.nbytes
    assert packed["obs"].nbytes / sent["obs"].numel() < 0.3


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
    session = Session(None, log)
    session.ray = inline_ray.install(monkeypatch)
    session.state, session.answered = ClusterState({"node": "127.0.0.1"}), math.inf
    yield session
    session.ray.shutdown()


def until(happened, seconds=20):
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_three_shards_are_sampled_as_one(session):
    """Chi-square over 100,000 draws in proportion to priority, with shards of different sizes and sums."""
    shards = [ReplayShard(SPEC, 1, 40, 1.0, seed) for seed in range(3)]
    for number, shard in enumerate(shards):
        outbox = Outbox(SPEC, 30, 3)
        Acting(outbox.ring, number).steps(5 + 5 * number)
        shard.insert(0, outbox.take())
    handles = [session.actor_class(lambda shard=shard: shard).remote() for shard in shards]
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
        return session.actor_class(lambda: shard).remote()

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


def test_weights_arrive_in_the_version_that_is_asked_for_also_from_a_restarted_server(session, tape, monkeypatch):
    monkeypatch.setattr("a3c_mp.cluster.parameters.SEND_SECONDS", 0.1)
    net, copy = nn.Linear(2, 3), nn.Linear(2, 3)
    publisher = Publisher(session, net)
    reader = Reader(publisher)
    assert reader.load(copy) == 0
    older = net.weight.detach().clone()
    with torch.no_grad():
        net.weight += 1
    assert publisher.publish(net) == 1
    assert reader.load(copy, exact=0) == 0
    assert torch.equal(copy.weight, older)
    assert reader.load(copy, exact=1) == 1
    assert torch.equal(copy.weight, net.weight)
    until(lambda: publisher.look_after() or publisher._has_answered)
    session.ray.kill(publisher.server, no_restart=False)
    until(lambda: publisher.look_after() or tape.messages)
    assert tape.messages == ["the parameter server died; another one is started"]
    assert reader.load(copy, exact=0) == 0, "it has both versions again"
    assert reader.load(copy) == 1


def test_who_owes_an_answer_for_too_long_is_killed(session, monkeypatch):
    monkeypatch.setattr("a3c_mp.cluster.session.STUCK_SECONDS", 0.2)
    monkeypatch.setattr(session, "kill", lambda actor: killed.append(actor))
    killed, actor = [], session.actor_class(threading.Event).remote()
    call = session.call(actor, "wait", 20)
    assert not session.is_done(call)
    assert not killed
    until(lambda: session.is_done(call) or killed)
    assert killed[0] is actor
    assert session.is_done(session.call(session.actor_class(threading.Event).remote(), "is_set"), 20)


class StuckShards:
    """Makes shards of which the first is stuck in its second insertion, until it is killed."""

    def __init__(self, session):
        self.session, self.stopped, self.started = session, threading.Event(), []
        session.kill = lambda actor: self.stopped.set()

    def __call__(self, number):
        self.started.append(actor := self.session.actor_class(StuckShard).remote(self, not self.started))
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
    monkeypatch.setattr("a3c_mp.cluster.session.STUCK_SECONDS", 0.2)
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
    monkeypatch.setattr("a3c_mp.cluster.session.STUCK_SECONDS", 0.2)
    replay.insert(0, "of the other shard")
    until(lambda: replay.look_after() or replay.size)
    assert (replay.size, len(shards.started)) == (len("of the other shard"), 2)


@pytest.mark.parametrize("head", ["lost", "busy", "there, and this process was stopped"])
def test_a_head_that_does_not_answer_ends_the_run_and_one_that_is_busy_has_more_time(session, monkeypatch, head):
    for name, seconds in {"ANSWER": 0.1, "SILENT": 0.3, "BUSY": 0.9, "POLL": 0.05}.items():
        monkeypatch.setattr(f"a3c_mp.cluster.session.{name}_SECONDS", seconds)
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


@pytest.mark.parametrize("returns", [True, False], ids=["in time", "late"])
def test_where_rays_shutdown_does_not_return_the_node_ends_after_this_process(session, monkeypatch, returns):
    """Nor does the interpreter wait for it again."""
    go_on, unregistered = threading.Event(), []
    monkeypatch.setattr(session.ray, "shutdown", (lambda: None) if returns else (lambda: go_on.wait(20)))
    monkeypatch.setattr("a3c_mp.cluster.session.atexit.unregister", unregistered.append)
    monkeypatch.setattr("a3c_mp.cluster.session.SHUTDOWN_SECONDS", 20.0 if returns else 0.1)
    with session:
        assert session.state.num_cpus == 1
    go_on.set()
    assert session._node.is_closed == returns
    assert unregistered == ([] if returns else [session.ray.shutdown])


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
        settings = WorkerOptions(**{"role": "actor", "slots_per_worker": 1, "niceness": 0, **options})
        return Fleet(
            self.session, Counting, (shared, at_start), lambda slot, result, rows: (result, rows), 2, states=states,
            options=settings, on_restart=self.said.append,
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
            found = [(message.worker, message.payload[0][:2]) for message in filled]
            assert found == [(0, (0, number)), (1, (1, number))]
            fleet.release(filled, number)
        assert fleet.take(lambda: True) == []
    assert not fleets.said


def test_rollouts_of_an_actor_count_in_their_order_even_if_a_later_one_arrives_first(fleets, monkeypatch):
    with fleets([], slots_per_worker=2, in_order=True) as fleet:
        first, wait, waits = list(fleet.actors[0].calls)[1], fleet.session.ray.wait, itertools.count()

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
    assert [message.payload[0][1] for message in first] == [1, 1]
    assert [message.payload[0][1] for message in second] == [1, 2], "a new process, and the one that was there"
    assert second[0].payload[0][2].version == 1
    (message,) = fleets.said
    assert message.text.splitlines()[0] == said.format(pid=os.getpid())
    assert message.replaced
    assert fleet.restarts == ("node" not in said)


@pytest.mark.parametrize("news", ["before", "after", "never"])
def test_what_is_lost_with_a_node_costs_no_restart(fleets, monkeypatch, news):
    """Ray may say that a result or a connection is lost, and not why."""
    gone = fleets.session.state.nodes.clear

    def mishap():
        if news == "before":
            gone()
        elif news == "after":
            threading.Timer(0.3, gone).start()
        raise (ObjectLostError if news == "before" else ActorUnavailableError)("no copy, or no connection")

    if news == "never":
        monkeypatch.setattr("a3c_mp.cluster.session.ANSWER_SECONDS", 0.3)
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


@pytest.fixture
def killed(session, monkeypatch):
    """Actors that are killed; `go_on` is set then."""
    monkeypatch.setattr("a3c_mp.cluster.fleet.BEAT_SECONDS", 0.05)
    killed = SimpleNamespace(actors=[], go_on=threading.Event())
    monkeypatch.setattr(session, "kill", lambda actor: (killed.actors.append(actor), killed.go_on.set()))
    return killed


def test_an_actor_without_heartbeats_is_killed_and_one_that_is_idle_is_not(fleets, killed):
    with fleets([lambda: killed.go_on.wait(20)], hang_seconds=1.0, in_order=True) as fleet:
        filled = fleet.take(lambda: False)
        idle_until, first = time.monotonic() + 1.5, fleet.actors[0].handle
        fleet.take(lambda: time.monotonic() > idle_until)
        assert not killed.actors
        fleet.release(filled, 1)
        fleet.take(lambda: False)
        assert killed.actors == [first]
    assert "sent no heartbeat for 1 s and was killed (--hang-seconds); restart 1 of 5" in fleets.said[0].text


@pytest.mark.parametrize("is_waiting", [False, True], ids=["hangs", "waits for a place"])
def test_an_actor_that_hangs_while_it_starts_is_killed_and_one_without_a_place_is_not(
    fleets, killed, monkeypatch, is_waiting
):
    monkeypatch.setattr("a3c_mp.cluster.fleet.START_SECONDS", 0.5)
    monkeypatch.setattr("a3c_mp.cluster.fleet.WAITING_SECONDS", 0.2)
    with fleets([lambda: killed.go_on.wait(20)], hang_seconds=0.5, in_order=True, at_start=True) as fleet:
        if is_waiting:
            place = frozenset([fleet.actors[0].handle._actor_id.hex()])
            fleets.session.state = fleets.session.state._replace(waiting=place)
            waited = time.monotonic() + 1.5
            fleet.take(lambda: time.monotonic() > waited)
            assert (fleet.placed, killed.actors) == (1, [])
            killed.go_on.set()
        fleet.take(lambda: False)
        assert (fleet.placed, fleet.actors[0].starts) == (2, 1 if is_waiting else 2)
    texts = [event.text for event in fleets.said]
    if is_waiting:
        assert texts[0] == "actor 0 waits for a node with a free CPU"
        assert texts[1].startswith("actor 0 has found a place (pid ")
        assert {event.actor for event in fleets.said} == {-1}, "in a deterministic run its games stay in the count"
    else:
        assert "actor 0 sent no heartbeat" in texts[0]


# ---- who may use a cluster


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(access.HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


def test_tokens_and_addresses_are_for_their_owner_only(home):
    token = access.find_token(None, make=True)
    assert token == home / "ray_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert access.find_token(None, make=True).read_text() == token.read_text()
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
    monkeypatch.setattr(command, "check_installed", lambda: None)
    for arguments in (["head"], ["join", "host:1"], ["status"]):
        monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
        assert command.main() == 2
        assert capsys.readouterr().err.startswith(f"error: folder={home}: {message}")


def test_a_head_that_ends_leaves_the_address_of_a_later_one(home):
    with contextlib.ExitStack() as later:
        with access.saved_address(ClusterAddress("host:1", "token")):
            later.enter_context(access.saved_address(ClusterAddress("host:2", "token")))
        assert access.read_address().address == "host:2"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["head", "--port", "99999"],
            "error: port=127.0.0.1:99999: it cannot be bound (bind(): port must be 0-65535.)",
        ),
        (["join", "auto"], "error: address=auto: this machine has no node of a cluster"),
        (["join", "127.0.0.1:99999"], "error: address=127.0.0.1:99999: nothing answers there; give HOST:PORT"),
    ],
)
def test_a_node_that_cannot_be_started_says_so_in_one_line(home, monkeypatch, capsys, arguments, line):
    access.find_token(None, make=True)
    monkeypatch.setattr(command, "check_installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
    assert command.main() == 2
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
from a3c_mp.cluster import __main__ as command, node
node.RAY_START, command.check_installed = {SLOW!r}, lambda: None
sys.exit(command.main())
"""
    with access.socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    assert interrupted(tmp_path, "-c", code, "head", "--port", port) == (0, "", "")
    assert not os.path.exists(f"/proc/{(tmp_path / 'started').read_text().strip()}")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "started"}


TOKENS = {
    "no token": (lambda home: None, "it cannot be read (No such file or directory)"),
    "open": (lambda home: access.find_token(None, make=True).chmod(0o640), "other users may read it; chmod 600"),
}


@pytest.mark.parametrize(("make", "message"), TOKENS.values(), ids=TOKENS)
def test_a_token_file_that_cannot_be_used_is_refused(home, make, message):
    make(home)
    with pytest.raises(ConfigError) as error:
        access.find_cluster("host:1", None)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="address=auto: this machine has no node of a cluster"):
        access.find_cluster("auto", None)


CLOSED, NODE = {"error": "Unauthenticated"}, {"address": "10.0.0.2", "cpus": 1, "versions": {"torch": "1.0"}}
FREE = {"free_cpus": 1, "nodes": [{**NODE, "versions": {}}]}
ANSWERS = {
    "open cluster": ((FREE, FREE), "the cluster does not clearly refuse a wrong token: anyone may be able to run"),
    "wrong token": ((CLOSED, CLOSED), "the cluster refuses the token in secret"),
    "silent": ((FREE, {"error": "Deadline"}), "the cluster does not clearly refuse a wrong token"),
    "no head": (({"error": "Deadline"}, CLOSED), "the head does not answer (Deadline)"),
    "no place": (({**FREE, "free_cpus": 0}, CLOSED), "num-actors=2: the cluster at "),
    "other torch": (({**FREE, "nodes": [NODE]}, CLOSED), "its node at 10.0.0.2 has torch 1.0, here "),
}


@pytest.mark.parametrize(("answers", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_cluster_that_cannot_be_used_is_refused_in_one_line(monkeypatch, answers, message):
    monkeypatch.setattr(access, "_ask", lambda address, settings: answers["RAY_AUTH_TOKEN" in settings])
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


# ---- nodes


@pytest.fixture
def start_node(monkeypatch, tmp_path):
    """Starts nodes of one process, which `ray start` leaves behind: `sleep`, under the name of a main process."""
    started = []
    (raylet := tmp_path / "raylet").symlink_to("/bin/sleep")

    def start(seconds):
        monkeypatch.setattr(node, "RAY_START", f"import subprocess; subprocess.Popen(['{raylet}', '{seconds}'])")
        started.append(new := Node([], {}))
        (new.folder / "ray").mkdir()
        (new.folder / "ray" / "ray_current_cluster").write_text("host:1")
        assert new.wait_for_start() == "host:1"
        return new

    yield start
    for new in started:
        with contextlib.suppress(OSError):
            new.close()


def processes_of(ray_node):
    """Processes of a node's session, which its guardian leads."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found += [int(name)] if os.getsid(int(name)) == ray_node._guardian.pid else []
    return found


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "closed"])
def test_a_node_ends_with_its_parent_and_leaves_nothing(start_node, is_killed):
    ray_node = start_node(100)
    assert len(processes_of(ray_node)) == 2
    if is_killed:
        os.close(ray_node._pipe)  # as the kernel does
        ray_node._guardian.wait(20)
    else:
        ray_node.close()
    assert not ray_node.folder.exists()
    assert not processes_of(ray_node)


def test_a_node_that_cannot_be_started_is_a_line_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(node, "RAY_START", "import sys; sys.exit('no memory')")
    failed = Node([], {})
    with pytest.raises(ConfigError, match=r"node: Ray cannot be started here \(no memory\)"):
        failed.wait_for_start()
    failed.close()
    assert not failed.folder.exists()


def test_a_main_process_that_ends_is_noticed(monkeypatch, start_node):
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.1)
    assert command.wait(start_node(1)) == 1


@pytest.mark.parametrize("end", ["of the run", "of its time", "by a second signal", "without a run"])
def test_a_node_that_is_ended_by_a_signal_waits_for_the_runs_on_it(start_node, monkeypatch, capsys, end):
    def stopped():
        raise Stopped(0)

    def pause(seconds):
        if (number := next(pauses)) == 3 and end == "of the run":
            run.kill()
            run.wait()
        elif number == 3 and end == "by a second signal":
            stopped()

    used, pauses = start_node(100), itertools.count()
    code = "import time; file = open('log', 'w'); time.sleep(100)"  # a file of the node's folder, as a trainer has
    run = subprocess.Popen([sys.executable, "-c", code], cwd=used.folder)
    try:
        until(used.is_used)
        if end == "without a run":
            run.kill()
            run.wait()
        monkeypatch.setattr(used, "wait_for_end", stopped)
        monkeypatch.setattr(command, "GRACE_SECONDS", 0.5 if end == "of its time" else 60.0)
        monkeypatch.setattr(command, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        with contextlib.suppress(Stopped):
            assert command.wait(used) == 0
    finally:
        run.kill()
        run.wait()
    assert (next(pauses) > 0) == (end != "without a run")
    text = "a run uses this node: stop it; the node ends in "
    assert (text in capsys.readouterr().err) == (end != "without a run")
