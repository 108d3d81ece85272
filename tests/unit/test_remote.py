"""Messages between the learner and nodes that join: slots, weights, snapshots for evaluators."""

import contextlib
import itertools
import logging
import math
import select
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from nodes import free_port, wait_for_peers
from torch import nn

import train_task
from a3c_mp.algorithms import attach, roles
from a3c_mp.algorithms.actor_critic import make_optimizer
from a3c_mp.algorithms.node_evaluator import PLAYED, EvaluatorChannel, InlineEvaluator, NodeEvaluator
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.supervisor import Supervisor
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerEvent, WorkerOptions
from a3c_mp.run import evaluator
from a3c_mp.run.evaluator import EvaluationGames
from a3c_mp.run.progress import Progress
from a3c_mp.task import joining
from a3c_mp.task import node as node_module
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.exchange import FILLED, JOIN, TOKENS, NodeChannel, NodePool, Setup
from a3c_mp.task.joining import JoinedNodes
from a3c_mp.task.node import FirstNode, JoinedNode, Node
from a3c_mp.task.parallel import Role
from a3c_mp.task.remote import RemoteChannel, RemoteWeights, serve_weights
from a3c_mp.task.router import Router
from a3c_mp.task.start import StartBarrier
from a3c_mp.task.task import FINISH

SPEC = {"obs": ((2, 3), torch.float32), "done": ((2,), torch.bool)}


@pytest.fixture
def nodes(log):
    """A learner and two others, in this process."""
    with ipc_folder() as folder, contextlib.ExitStack() as stack:
        ends = local_endpoints(folder, "star", [("learner",), ("collector",), ("collector",)])
        stacks = [stack.enter_context(contextlib.ExitStack()) for _ in ends]
        routers = [own.enter_context(Router(end, log)) for own, end in zip(stacks, ends, strict=True)]
        for router in routers:
            wait_for_peers(router, 2, 10)
        results = []
        child = SimpleNamespace(is_done=True, results=results, record_result=lambda: results.append(True))
        learner = FirstNode(routers[0], Supervisor([child]), is_interrupted=lambda: False, known_labels=())
        others = list(map(Node, routers[1:]))
        for node, own in zip(others, stacks[1:], strict=True):
            node.leave = own.close
        yield learner, *others


def run_until(happened, *nodes, timeout=20):
    """Have nodes handle their messages until something has happened."""
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
        for node in nodes:
            node.look()


def run_in_thread(function, *args):
    """Call a function that waits for others; returns the thread and the list that gets its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


# ---- weights


@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16])
def test_weights_cross_between_machines_that_compute_in_other_dtypes(nodes, theirs, ours):
    trained, acting = nn.Linear(5, 3), nn.Linear(5, 3).to(ours)
    weights = Weights(trained, theirs)
    serve_weights(nodes[0], weights)
    remote = RemoteWeights(nodes[1], ours)
    assert remote.load(acting) == 0
    for mine, original in zip(acting.parameters(), trained.parameters(), strict=True):
        assert mine.dtype == ours
        assert torch.equal(mine, original.to(theirs).to(ours))


def test_weights_travel_again_only_when_they_are_newer(nodes):
    trained, acting = nn.Linear(5, 3), nn.Linear(5, 3)
    weights = Weights(trained)
    serve_weights(nodes[0], weights)
    remote = RemoteWeights(nodes[1])
    remote.load(acting)
    nn.init.zeros_(acting.weight)
    assert remote.load(acting) == 0
    assert not acting.weight.any(), "nothing came"
    weights.publish(trained)
    assert remote.load(acting) == 1
    assert torch.equal(acting.weight, trained.weight)


def test_weights_are_waited_for_until_the_learner_answers_or_the_task_ends(nodes):
    net = nn.Linear(5, 3)
    thread, results = run_in_thread(RemoteWeights(nodes[1]).load, net)
    thread.join(0.3)
    assert thread.is_alive(), "nobody answers yet"
    serve_weights(nodes[0], Weights(net))
    thread.join(20)
    assert results == [0]
    thread, results = run_in_thread(RemoteWeights(nodes[2], timeout=0.01).load, net)
    nodes[2].finishing = True
    thread.join(20)
    assert not thread.is_alive()


# ---- slots


@pytest.fixture
def make_pool(nodes):
    """An pool for these collectors of this machine, and for one of another; `told` is what it reports."""

    def make(numbers, num_workers, slots_per_worker=2):
        told = []
        states = SimpleNamespace(start=7, record_start=lambda worker: None)
        options = WorkerOptions(slots_per_worker=slots_per_worker)
        slots = Slots(SPEC, num_workers * slots_per_worker)
        pool = NodePool({}, numbers, slots, num_workers, states=states, options=options, on_restart=told.append)
        pool.connect(nodes[0])
        pool.told = told
        return pool

    return make


def test_a_collector_that_was_cut_off_fills_its_slots_again_and_no_slot_twice(nodes, make_pool):
    hub, node, _ = nodes
    pool = make_pool([1], 1)
    channel = NodeChannel(node, Setup(0, (7, 0, 0)))
    run_until(lambda: len(channel._tokens) == 2, hub, node)
    for _ in range(2):
        channel.send(channel.take().slot, 0)
    run_until(lambda: len(pool.ledger.ready[0]) == 2, hub)
    held = pool.take(lambda: False)  # the learner reads slot 0
    assert [filled.slot for filled in held] == [0]
    channel._on_joined("node.0")
    run_until(lambda: channel._tokens, hub, node)
    assert [token.slot for token in channel._tokens] == [1], "slot 0 is the learner's"
    assert not pool.ledger.ready[0], "what it had sent before is dropped, as it writes there again"
    text = "collector 0 was cut off and is back; its rollout is lost"
    assert pool.told == [WorkerEvent(0, text, replaced=False)]
    channel.take()
    channel._on_joined("node.0")  # while it fills slot 1
    channel.send(1, 0)
    pool.release(held, 5)
    run_until(lambda: len(channel._tokens) == 2, hub, node)
    assert [token.slot for token in channel._tokens] == [1, 0], "none of them twice"
    assert not pool.ledger.ready[0], "a rollout of an earlier session is not sent"
    channel.send(channel.take().slot, 0)
    run_until(lambda: pool.ledger.ready[0], hub)


def test_a_remote_collector_gets_a_place_and_its_fields_arrive(nodes, make_pool, tape):
    hub, node, other = nodes
    pool = make_pool([], 1, slots_per_worker=1)
    thread, results = run_in_thread(RemoteChannel, node, Slots(SPEC, 1))
    run_until(lambda: results, hub)
    thread.join()
    [channel] = results
    assert (channel.worker, channel.seed_key) == (0, (7, 0, 1))
    run_until(lambda: channel._tokens, hub, node)
    fields = channel.fields(pool.slots, channel.take().slot)
    fields["obs"].copy_(torch.arange(6.0).view(2, 3))
    channel.send(0, 3)
    [filled] = pool.take(lambda: False)
    assert filled.payload == 3
    assert torch.equal(pool.slots[0]["obs"], fields["obs"])
    assert pool.told[0].joined

    def refused():
        with pytest.raises(ConfigError, match="its 1 places"):
            RemoteChannel(other, Slots(SPEC, 1))

    other.router.endpoint = SimpleNamespace(dials=("tcp://hub:1",))
    thread, _ = run_in_thread(refused)
    run_until(lambda: not thread.is_alive(), hub)
    for _ in range(99):
        other.send(JOIN, "host", to="node.0")
    other.send(JOIN, to="node.0")
    run_until(lambda: "malformed message slots.join" in tape.messages[-1], hub)
    assert len(pool.told) == 1
    refusals = [text for text in tape.messages if "a collector was refused: all 1 places are taken" in text]
    assert len(refusals) == 7, "numbers 1, 2, 4, 8, 16, 32 and 64"


@pytest.mark.parametrize("args", [(), ([[0, 1]],)])
def test_tokens_come_from_the_learner_alone(nodes, tape, args):
    _, node, other = nodes
    channel = NodeChannel(node, Setup(0, (7, 0, 0)))
    other.send(TOKENS, *args, to="node.1")
    run_until(lambda: tape.messages, node)
    assert "slots.tokens from node.2 dropped" in tape.messages[0]
    assert "only node.0 may send it" in tape.messages[0]
    assert channel._tokens == []


def test_one_of_the_same_machine_cannot_send_fields_nor_another_in_its_name(nodes, make_pool, tape):
    hub, node, other = nodes
    pool = make_pool([1], 2)
    NodeChannel(node, Setup(0, (7, 0, 0)))
    run_until(lambda: pool._names[0] == "node.1", hub)
    other.send("slots.ready", 0, to="node.0")
    other.send(FILLED, 0, 0, None, to="node.0")
    run_until(lambda: tape.messages, hub)
    assert "malformed message slots.ready from node.2 dropped" in tape.messages[0]
    assert pool._names == ["node.1", None]


# ---- how nodes begin


def test_nodes_begin_once_all_are_there_and_one_that_was_cut_off_meanwhile_hears_of_it(nodes):
    hub, first, second = nodes
    barriers = [StartBarrier(hub), StartBarrier(first)]
    first.send("all has arrived", to="node.0")
    run_until(lambda: hub._pending, hub, first)
    assert not any(barrier.is_over for barrier in barriers)
    barriers.append(StartBarrier(second))
    run_until(lambda: all(barrier.is_over for barrier in barriers), *nodes)
    barriers[2].is_over = False
    barriers[2]._on_joined("node.0")
    run_until(lambda: barriers[2].is_over, *nodes)


def test_a_node_that_is_lost_before_the_start_is_waited_for_again(nodes):
    barrier = StartBarrier(nodes[0])
    for name in ("node.2", "node.1"):
        barrier._on_here(name)
        assert not barrier.is_over
    barrier._on_complete("node.2")
    barrier._on_left("node.2")
    barrier._on_complete("node.1")
    assert not barrier.is_over
    barrier._on_complete("node.2")
    assert not barrier.is_over, "its successor has not greeted node 0"
    barrier._on_here("node.2")
    assert barrier.is_over


# ---- a node 0 that is lost


@pytest.fixture
def joined(tmp_path, log, monkeypatch):
    """A node that has joined, its log lines, the end of node 0, and a function that makes a router for another one."""
    for name, seconds in (("GONE", 0.3), ("PROBE", 0.01), ("LOST", 0.0)):
        monkeypatch.setattr(node_module, f"{name}_SECONDS", seconds)
    address, key_file, lines = f"tcp://127.0.0.1:{free_port()}", tmp_path / "key", []

    def enter(greeting):
        return Router(Endpoint(0, "star", binds=(address,), key_file=key_file, greeting={"run": greeting}), log)

    with contextlib.ExitStack() as hub:
        hub.enter_context(enter("first"))
        with Router(Endpoint(None, "star", dials=(address,), key_file=key_file), log) as router:
            yield JoinedNode(router, lines.append), lines, hub.close, enter


def test_a_node_ends_when_node_0_was_killed(joined):
    node, lines, end, _ = joined
    end()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="refuses connections"):
        run_until(lambda: False, node)
    assert time.monotonic() - begin >= 0.3
    assert not lines


def test_a_node_ends_when_another_task_takes_the_place_of_the_first(joined):
    node, _, end, enter = joined
    end()
    with enter("second"), pytest.raises(WorkerError, match="another task listens at"):
        run_until(lambda: False, node)


def test_a_node_waits_while_the_link_is_down(joined, monkeypatch):
    node, lines, end, enter = joined
    with monkeypatch.context() as patch:
        patch.setattr(
            socket, "create_connection", lambda *args, **kwargs: (_ for _ in ()).throw(TimeoutError("timed out"))
        )
        end()
        run_until(lambda: lines, node)
        node.look()
    with enter("first"):
        run_until(lambda: len(lines) > 1, node)
    address = node.router.endpoint.dials[0]
    assert lines == [f"{address} does not answer (timed out); waiting until it does", f"{address} answers again"]


def test_a_node_that_has_joined_ends_neither_the_task_nor_other_nodes(tmp_path, log):
    with ipc_folder() as folder, contextlib.ExitStack() as stack:
        key = {"key_file": tmp_path / "key"}
        ends = local_endpoints(folder, "star", [(), ()], listen="tcp://127.0.0.1:0", **key)
        routers = [stack.enter_context(Router(end, log)) for end in ends]
        address = next(address for address in routers[0].addresses if address.startswith("tcp"))
        attached = Endpoint(None, "star", dials=(address,), **key)
        routers += [stack.enter_context(Router(attached, log)) for _ in range(2)]
        for router in routers:
            wait_for_peers(router, 3, 10)
        hub, own, *joined = nodes = list(map(Node, routers))
        seen = []
        for node in nodes:
            node.handle("after", lambda sender: seen.append(sender))
        joined[0].send(FINISH)
        joined[0].send("after")
        run_until(lambda: len(seen) == 3, *nodes)
        assert not any(node.finishing for node in nodes)
        own.send(FINISH)
        run_until(lambda: all(node.finishing for node in (hub, *joined)), *nodes)


def test_events_for_tasks_are_not_kept_where_nodes_are_only_looked_after(nodes, monkeypatch):
    hub, spoke, _ = nodes
    child = SimpleNamespace(is_done=False)
    looks = iter(range(9))

    def watch(should_stop, also):
        hub.send("event", number := next(looks))
        select.select(also, [], [], 10)
        child.is_done = number == 8

    supervisor = SimpleNamespace(children=[child], start=bool, stop=bool, watch=watch, await_own_end=bool)
    monkeypatch.setattr(joining, "Supervisor", lambda *args, **settings: supervisor)
    with JoinedNodes(None, (), [Role()], spoke.router, spoke.router.log) as joined:
        joined.wait()
        assert joined._node._pending == []


def test_a_collector_that_has_lost_its_place_ends_alone(nodes, monkeypatch, tape):
    children = [SimpleNamespace(is_done=False, had_result=True), SimpleNamespace(is_done=False, had_result=False)]
    supervisor = SimpleNamespace(children=children, start=bool, stop=bool)
    monkeypatch.setattr(joining, "Supervisor", lambda *args, **settings: supervisor)
    refusal = (joining.REPORT_REFUSAL, "attach-to", "tcp://hub:1", "its 2 places are taken", "attach fewer")
    with JoinedNodes(None, (), [Role(), Role()], nodes[1].router, nodes[1].router.log) as joined:
        joined._on_report(0, refusal)
        assert "has lost its place and ends: attach-to=tcp://hub:1: its 2 places are taken" in tape.messages[-1]
        with pytest.raises(ConfigError, match="places are taken"):
            joined._on_report(1, refusal)  # it never had one
        children[1].is_done = True
        with pytest.raises(ConfigError, match="places are taken"):
            joined._on_report(0, refusal)  # there is no other


# ---- evaluators


def test_a_run_whose_evaluator_is_a_node_shares_no_snapshots(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "Weights", lambda net: pytest.fail("allocated"))
    args = train_task.Args(env_id="CartPole-v1", eval_every=100, runs_dir=tmp_path, run_name="r")
    net = roles.make_net(args)
    with roles.make_run(args, net, make_optimizer(args, net)) as run:
        assert run.progress.evals.evaluator is None


def test_a_node_that_has_joined_allocates_what_it_uses(monkeypatch):
    sizes = []
    monkeypatch.setattr(attach, "Slots", lambda spec, num_slots: sizes.append(num_slots))
    args = train_task.Args(env_id="CartPole-v1")
    attach.run_node_of_task(None, lambda node, args, memory: None, args)
    assert sizes == [], "as for an evaluator"
    attach.run_node_of_task(None, lambda node, args, memory: (memory.slots, memory.slots), args)
    assert sizes == [1]


@pytest.fixture
def evaluators(nodes):
    """The learner's side, and a function that adds the other side at a node; node.1 is of the learner's machine."""
    lines = []
    log = logging.Logger("run")
    log.info = lines.append
    run = SimpleNamespace(args=SimpleNamespace(eval_episodes=2), log=log, is_interrupted=lambda: False)
    learner = NodeEvaluator(nodes[0], "node.1", run, lambda: None, others=False)
    learner.lines = lines
    return learner, lambda node: EvaluatorChannel(node, None, nn.Linear(2, 1))


def has_snapshot(end):
    return lambda: end._snapshot is not None


def test_an_evaluator_of_another_machine_goes_first_and_the_own_one_is_its_spare(nodes, evaluators):
    hub, local, remote = nodes
    learner, add = evaluators
    own, joined = add(local), add(remote)
    run_until(lambda: len(learner._ready) == 2, hub)
    net = nn.Linear(2, 1)
    learner.start(net)
    run_until(has_snapshot(joined), hub, local, remote)
    assert own._snapshot is None
    assert torch.equal(joined.take().weight, net.weight)
    remote.leave()
    run_until(has_snapshot(own), hub, local)
    assert [line.split(" (")[0].split(" from")[0] for line in learner.lines] == ["evaluator joined", "evaluator left"]
    own.take()
    own.send(([1.0, 2.0], [3, 4], "sha"))
    run_until(lambda: learner._result, hub)
    assert hub.child("node.1").results == [True], "an exception later on is worth a restart"
    assert learner.poll() == ([1.0, 2.0], [3, 4], "sha")
    assert learner.poll() is None


def test_without_an_evaluator_that_could_still_play_nothing_is_waited_for(nodes, evaluators):
    """The evaluator of this machine has ended with the task, and none can join from another."""
    hub, local, _ = nodes
    learner, add = evaluators
    end = add(local)
    run_until(lambda: learner._ready, hub)
    learner.start(nn.Linear(2, 1))
    run_until(has_snapshot(end), hub, local)
    assert learner.wait(0.1) is None, "it may answer"
    local.leave()
    run_until(lambda: not learner._ready, hub)
    child = hub.child("node.1")
    child.is_done = False
    assert learner.poll() is None, "it may be started again"
    child.is_done = True
    with pytest.raises(WorkerError, match="the evaluator ended with the task and sent no result"):
        learner.wait(60)
    learner.others = True
    assert learner.wait(0.1) is None, "one of another machine may come back"


def test_an_evaluator_that_repeats_itself_joins_once(nodes, evaluators, tape):
    hub, _, remote = nodes
    learner, add = evaluators
    end = add(remote)
    for _ in range(9):
        end._say_ready()
    remote.send(PLAYED, to="node.0")
    run_until(lambda: tape.messages, hub)
    assert (len(learner.lines), learner._ready) == (1, ["node.2"])


@pytest.mark.parametrize(
    "args",
    [
        (),
        (1, [1.0], [1, 1], "x"),
        (1, ["a", 1.0], [1, 1], "x"),
        (1, [1.0, 1.0], [1, 1], 5),
        (1, [10**400, 1.0], [1, 1], "x"),
        (1, None, [1, 1], "x"),
    ],
)
def test_a_malformed_result_is_dropped(nodes, evaluators, tape, args):
    hub, _, remote = nodes
    learner, add = evaluators
    end = add(remote)
    learner.start(nn.Linear(2, 1))
    run_until(has_snapshot(end), hub, remote)
    remote.send(PLAYED, *args, to="node.0")
    run_until(lambda: tape.messages, hub)
    assert learner._result is None
    assert "malformed message evaluator.played from node.2 dropped" in tape.messages[0]
    remote.send(PLAYED, 1, [1.0, 1.0], [1, 1], "x", to="node.0")
    run_until(lambda: learner._result, hub)


@pytest.mark.parametrize("seconds", [math.inf, 0.3])
def test_the_games_of_a_standalone_evaluator_end_with_the_run_and_with_the_time(seconds):
    settings = train_task.Args(env_id="CartPole-v1", eval_episodes=1_000_000)
    closed, looks = [], itertools.count()
    node = SimpleNamespace(
        beat=lambda: None, closing=lambda env: env, close=lambda: closed.append(True), starting=lambda: None
    )
    interrupted = seconds == math.inf
    end = InlineEvaluator(node, EvaluationGames.of(settings), lambda: interrupted and next(looks) > 50)
    end.start(roles.make_net(settings))
    assert end.wait(seconds) is None
    assert closed
    interrupted = False
    assert end.take() is not None, "it has no result yet"


# ---- what is counted


class Args(CommonArgs):
    @property
    def max_actors(self):
        return self.num_actors + 1


def test_the_mean_return_waits_for_a_collector_from_its_join_until_it_leaves():
    progress = Progress(Args(num_actors=1, num_envs=1))
    games = iter(range(100))

    def end_game(actor=0):
        return [
            counted.episode.episode_return
            for counted in progress.record_rollout(1, [Episode(next(games), 5)], actor, 0)
        ]

    assert end_game() == [0], "nobody has joined"
    progress.on_restart(WorkerEvent(1, "", replaced=False, joined=True))
    assert end_game() == [1], "it started before that"
    assert end_game() == [], "it started after the first game of the one that joined"
    assert end_game(actor=1) == [3, 2]
    assert end_game() == [4]
    assert end_game() == []
    progress.on_restart(WorkerEvent(1, "", replaced=False, left=True))
    assert end_game() == [5, 6]
    assert progress.worker_restarts == 0
