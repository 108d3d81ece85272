"""Messages between the learner and nodes that join: slots, weights, snapshots for evaluators."""

import itertools
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from nodes import free_port
from torch import nn

import train_task
from a3c_mp.algorithms import node_evaluator
from a3c_mp.algorithms.actor_critic import A3CSetup
from a3c_mp.algorithms.node_evaluator import PLAYED, EvaluatorChannel, InlineEvaluator, NodeEvaluator
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.pool import WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.supervisor import Supervisor
from a3c_mp.processes.weights import Weights
from a3c_mp.run.progress import Progress
from a3c_mp.task import exchange, parallel
from a3c_mp.task import node as node_module
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.exchange import NodeChannel, NodePool
from a3c_mp.task.node import ALL_RUNS, NAMES, PENDING, REPORT_REFUSAL, FirstNode, JoinedNode, Node
from a3c_mp.task.parallel import Role, join_nodes
from a3c_mp.task.wire import FINISH

SPEC = {"obs": ((2, 3), torch.float32), "done": ((2,), torch.bool)}


def no_processes():
    """A supervisor of one process that has ended with its work done."""
    options = {"max_restarts": 0, "hang_seconds": 60.0, "on_message": None, "on_restart": None}
    return Supervisor([SimpleNamespace(is_done=True)], torch.zeros(1), **options)


@pytest.fixture
def nodes(net):
    """A learner and two others, in this process."""
    with ipc_folder() as folder, net.stack:
        ends = local_endpoints(folder, [("learner",), ("collector",), ("collector",)], None)
        routers = [net.enter(end) for end in ends]
        learner = FirstNode(routers[0], no_processes())
        yield learner, *map(Node, routers[1:])


def run_until(happened, *nodes, timeout=20):
    """Have nodes handle their messages until something has happened."""
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
        for node in nodes:
            node.look()


def connect(make, *nodes):
    """Call a function that waits for other nodes, while they look at their messages; returns its result."""
    results = []

    def call():
        try:
            results.append(make())
        except Exception as error:
            results.append(error)

    threading.Thread(target=call).start()
    run_until(lambda: results, *nodes)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_a_flood_of_one_event_displaces_no_other_and_its_newest_wait_for_their_handler(nodes, tape):
    hub, node, _ = nodes
    node.send("rare")
    for number in range(PENDING + 5):
        node.send("number", number)
    node.send("end")
    ended, found = [], []
    hub.handle("end", ended.append)
    run_until(lambda: ended, hub)
    hub.handle("number", lambda sender, number: found.append(number), [int])
    assert found == list(range(5, PENDING + 5))
    assert hub.wait_for("rare", 0.0) is not None
    assert sum("too many events without a handler" in text for text in tape.messages) == 3, "1, 2, 4 so far"


def test_events_of_very_many_names_are_dropped_and_true_is_no_number(nodes, tape):
    hub, node, _ = nodes
    for number in range(NAMES + 5):
        node.send(f"name {number}")
    found, ended = [], []
    hub.handle("number", lambda sender, number: found.append(number), [int])
    hub.handle("end", ended.append)
    node.send("number", True)
    node.send("number", 1)
    node.send("end")
    run_until(lambda: ended, hub)
    assert found == [1]
    assert hub.wait_for("name 0", 0.0) is not None
    with pytest.raises(TimeoutError):
        hub.wait_for(f"name {NAMES + 1}", 0.0)
    assert "events of too many names" in tape.messages[0]
    assert "malformed message number dropped" in tape.messages[-1]


def test_wait_for_takes_each_event_once_in_order_whenever_it_has_come(nodes):
    hub, node, _ = nodes
    with pytest.raises(TimeoutError, match=r"no event 'round' within 0\.01 s"):
        node.wait_for("round", 0.01)
    for number in range(3):
        hub.send("round", number)
        hub.send("other", -number)
    run_until(lambda: len(node._waiting["other"]) == 3, node)  # as between two middlewares
    assert [node.wait_for("round").args for _ in range(3)] == [[0], [1], [2]]
    assert node.wait_for("other", 0.1).args == [0]
    hub.send("last")
    hub.send(FINISH, 1)
    assert node.wait_for("last").sender == "node.0"
    assert node.wait_for("last") is None, "the task has been ended"


def test_a_handler_that_looks_or_fails_changes_neither_order_nor_number(nodes):
    hub, node, _ = nodes
    seen = []

    def handle(sender, number):
        seen.append(number)
        if number == 1:
            hub.send("number", 5)
            time.sleep(0.05)
            node.look()
            raise ArithmeticError

    node.handle("number", handle)
    for number in range(5):
        hub.send("number", number)
    with pytest.raises(ArithmeticError):
        run_until(lambda: False, node)
    run_until(lambda: len(seen) == 6, node)
    assert seen == list(range(6))


def test_the_end_of_a_run_is_that_of_the_same_run_elsewhere(nodes):
    hub, node, _ = nodes
    hub.send(FINISH, 1)
    run_until(lambda: node.finishing, node)
    assert node.begin_run() == 1
    assert node.finishing
    assert node.begin_run() == 2
    assert not node.finishing
    hub.send(FINISH, 3)  # the other one is ahead
    run_until(lambda: node.finishing, node)
    assert node.begin_run() == 3
    assert node.finishing
    assert node.begin_run() == 4
    hub.send(FINISH, 2)
    hub.send("after")
    assert node.wait_for("after") is not None
    assert not node.finishing
    hub.send(FINISH, ALL_RUNS)
    run_until(lambda: node.finishing, node)
    node.begin_run()
    assert node.finishing


# ---- slots and weights


def own_memory(weights):
    """Of a collector on another machine: a slot that stands for all, and a copy of the weights."""
    fields = Slots(SPEC, 1)[0]
    return SimpleNamespace(slots=defaultdict(lambda: fields), weights=weights)


@pytest.fixture
def make_pool(nodes):
    """A pool for so many collectors of this machine, and for others; `events` is what it reports."""

    def make(num_local, num_workers, weights=None):
        events = []
        settings = {
            "states": SimpleNamespace(start=7, record_start=lambda worker: None),
            "options": WorkerOptions(slots_per_worker=2),
            "on_restart": events.append,
        }
        slots = Slots(SPEC, 2 * num_workers)
        pool = NodePool(num_local, slots, weights, lambda payload, fields: None, num_workers, **settings)
        pool.connect(nodes[0])
        for worker in range(num_local):
            pool.prepare(worker)
        pool.events = events
        return pool

    return make


def test_a_collector_that_was_cut_off_fills_its_slots_again_and_no_slot_twice(nodes, make_pool):
    hub, node, _ = nodes
    pool = make_pool(1, 1)
    channel = connect(lambda: NodeChannel(node), hub)
    assert (channel.worker, channel.seed_key) == (0, (7, 0, 0))
    for _ in range(2):
        channel.send(channel.take().slot, 0)
    run_until(lambda: len(pool.ledger.ready[0]) == 2, hub)
    held = pool.take(lambda: False)  # the learner reads slot 0
    assert [filled.slot for filled in held] == [0]
    channel._on_joined()
    run_until(lambda: channel._tokens, hub, node)
    assert [token.slot for token in channel._tokens] == [1], "slot 0 is the learner's"
    assert not pool.ledger.ready[0], "what it had sent before is dropped, as it writes there again"
    text = "collector 0 was cut off and is back; its rollout is lost"
    assert pool.events == [WorkerEvent(0, text, replaced=False)]
    channel.take()
    channel._on_joined()  # while it fills slot 1
    channel.send(1, 0)
    pool.release(held, 5)
    run_until(lambda: channel._tokens and len(channel._tokens) == 2, hub, node)
    assert [token.slot for token in channel._tokens] == [1, 0], "none of them twice"
    assert not pool.ledger.ready[0], "a rollout of an earlier session is not sent"
    channel.send(channel.take().slot, 0)
    run_until(lambda: pool.ledger.ready[0], hub)


@pytest.mark.parametrize("num_local", [0, 1])
def test_a_learner_without_collectors_says_that_it_waits_for_one(nodes, make_pool, monkeypatch, num_local):
    hub, node, _ = nodes
    monkeypatch.setattr(exchange, "ALONE_SECONDS", 0.1 if num_local == 0 else 0.05)
    pool, looks = make_pool(num_local, 1, Weights(nn.Linear(5, 3), torch.float32)), []

    def waits_in_vain():
        pool.take(lambda: looks.append(time.monotonic()) or looks[-1] > looks[0] + 0.5)
        return [event.text for event in pool.events if event.actor < 0]

    assert waits_in_vain() == ["no collector is connected; waiting for one"]
    looks.clear()
    pool.events.clear()
    own = None if num_local else own_memory(pool.weights)
    channel = connect(lambda: NodeChannel(node, own), hub)
    assert waits_in_vain() == []
    pool._set_name(channel.worker, None)  # it has left
    looks.clear()
    assert len(waits_in_vain()) == 1


@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16])
def test_weights_come_with_the_tokens_also_where_they_are_of_another_dtype(nodes, make_pool, theirs, ours):
    hub, node, _ = nodes
    trained, acting = nn.Linear(5, 3), nn.Linear(5, 3).to(ours)
    weights, own = Weights(trained, theirs), Weights(acting, ours)
    pool = make_pool(0, 1, weights)
    channel = connect(lambda: NodeChannel(node, own_memory(own)), hub)
    for version in range(3):
        assert own.load(acting) == version
        for mine, original in zip(acting.parameters(), trained.parameters(), strict=True):
            assert torch.equal(mine, original.to(theirs).to(ours))
        nn.init.normal_(trained.weight)
        weights.publish(trained)
        channel.send(channel.take().slot, version)
        run_until(lambda: pool.ledger.ready[0], hub)
        pool.release(pool.take(lambda: False), weights.version)
        run_until(lambda: len(channel._tokens) == 2, node)


# ---- a node 0 that is lost


@pytest.fixture
def joined(tmp_path, net, monkeypatch):
    """A node that has joined, its log lines, the end of node 0, and a function that makes a router for another one."""
    for name, seconds in (("GONE", 0.3), ("PROBE", 0.01)):
        monkeypatch.setattr(node_module, f"{name}_SECONDS", seconds)
    address, key_file, lines = f"tcp://127.0.0.1:{free_port()}", tmp_path / "key", []

    def enter(greeting):
        return net.enter(Endpoint(binds=(address,), key_file=key_file, greeting={"run": greeting}))

    hub = enter("first")
    router = net.enter(Endpoint(dials=address, key_file=key_file))
    net.inboxes.pop(router)
    return JoinedNode(router, no_processes(), lines.append), lines, lambda: net.leave(hub), enter


def test_a_node_ends_when_another_task_takes_the_place_of_the_first(joined, net):
    node, _, end, enter = joined
    end()
    enter("second")
    with pytest.raises(WorkerError, match="another task listens at"):
        net.wait_until(lambda: node.look() and False)


def test_a_node_waits_while_the_link_is_down(joined, net, monkeypatch):
    node, lines, end, enter = joined
    with monkeypatch.context() as patch:
        patch.setattr(
            socket, "create_connection", lambda *args, **kwargs: (_ for _ in ()).throw(TimeoutError("timed out"))
        )
        end()
        run_until(lambda: lines, node)
        node.look()
    enter("first")
    net.wait_until(lambda: node.look() or len(lines) > 1)
    address = node.address
    assert lines == [f"{address} does not answer (timed out); waiting until it does", f"{address} answers again"]


def test_a_node_that_has_joined_does_not_end_the_task(tmp_path, net):
    with ipc_folder() as folder:
        key = {"key_file": tmp_path / "key"}
        ends = local_endpoints(folder, [(), ()], "tcp://127.0.0.1:0", **key)
        hub, own = (net.enter(end) for end in ends)
        joined = net.enter(Endpoint(dials=hub.addresses[1], **key))
        node, seen = Node(hub), []
        node.handle("after", seen.append)
        for router, ends_it in ((joined, False), (own, True)):
            router.send(FINISH, 1)
            router.send("after")
            run_until(lambda: seen, node)
            seen.clear()
            assert node.finishing == ends_it


def test_a_collector_that_has_lost_its_place_ends_alone(nodes, monkeypatch, tape, log):
    refusal = (REPORT_REFUSAL, "attach-to", "tcp://hub:1", "its 2 places are taken", "attach fewer")

    def run_with(*children):
        """Each of them is refused in its turn; returns how many were."""
        refused = itertools.count()

        def supervise(*args, on_message, **settings):
            watch = lambda *args, also: on_message(next(refused), refusal)  # noqa: E731
            return SimpleNamespace(children=children, start=bool, stop=bool, watch=watch)

        monkeypatch.setattr(parallel, "Supervisor", supervise)
        joining = join_nodes([Role()] * len(children), nodes[1].router, {}, log)
        with pytest.raises(ConfigError, match="places are taken"), joining:
            pass
        return next(refused)

    had_place = SimpleNamespace(is_done=False, had_result=True)
    assert run_with(had_place, SimpleNamespace(is_done=False, had_result=False)) == 2, "the other never had a place"
    assert "has lost its place and ends: attach-to=tcp://hub:1: its 2 places are taken" in tape.messages[-1]
    assert run_with(had_place, SimpleNamespace(is_done=True, had_result=True)) == 1, "there is no other"


# ---- evaluators


@pytest.fixture
def evaluators(nodes):
    """The learner's side, and a function that adds the other side at a node; node.1 is of the learner's machine."""
    lines = []
    log = logging.Logger("run")
    log.info = lines.append
    progress = SimpleNamespace(evals=SimpleNamespace(has_failed=False))
    args = SimpleNamespace(eval_episodes=2)
    run = SimpleNamespace(args=args, log=log, progress=progress, is_interrupted=lambda: False)
    learner = NodeEvaluator(run, 1, others=False)
    learner.connect(nodes[0])
    learner.lines = lines
    return learner, lambda node: EvaluatorChannel(node, None, nn.Linear(2, 1))


def has_snapshot(end):
    return lambda: end._snapshot is not None


def test_an_evaluator_of_another_machine_goes_first_and_the_own_one_is_its_spare(nodes, evaluators, net):
    hub, local, remote = nodes
    learner, add = evaluators
    own, joined = add(local), add(remote)
    run_until(lambda: len(learner._ready) == 2, hub)
    snapshot = nn.Linear(2, 1)
    learner.start(snapshot)
    run_until(has_snapshot(joined), hub, local, remote)
    assert own._snapshot is None
    assert torch.equal(joined.take().weight, snapshot.weight)
    net.leave(remote.router)
    run_until(has_snapshot(own), hub, local)
    assert [line.split(" (")[0].split(" from")[0] for line in learner.lines] == ["evaluator joined", "evaluator left"]
    own.take()
    local.send(PLAYED, 1, [1.0, 2.0], [3, 4], "sha")
    run_until(lambda: learner._result, hub)
    assert learner.poll() == ([1.0, 2.0], [3, 4], "sha")
    assert learner.poll() is None


def test_without_an_evaluator_that_could_still_play_nothing_is_waited_for(nodes, evaluators, net, monkeypatch):
    """The evaluator of this machine has ended with the task, and none can join from another."""
    hub, local, remote = nodes
    learner, add = evaluators
    end = add(local)
    run_until(lambda: learner._ready, hub)
    learner.start(nn.Linear(2, 1))
    run_until(has_snapshot(end), hub, local)
    assert learner.wait(0.1) is None, "it may answer"
    net.leave(local.router)
    run_until(lambda: not learner._ready, hub)
    child = hub.supervisor.children[0]
    child.is_done = False
    assert learner.poll() is None, "it may be started again"
    child.is_done = True
    with pytest.raises(WorkerError, match="the evaluator ended with the task and sent no result"):
        learner.wait(60)
    learner.others = True
    assert learner.wait(0.1) is None, "one of another machine may come back"
    learner.on_lost(WorkerError("the own one is given up"))
    with pytest.raises(WorkerError, match="the own one is given up"):
        learner.poll()
    add(remote)
    run_until(lambda: learner._ready, hub)
    remote.router.greeting = {"run": "another"}
    EvaluatorChannel._report_ready(SimpleNamespace(node=remote, _greeting={}))  # it joins another task: says nothing
    net.leave(remote.router)
    run_until(lambda: not learner._ready, hub)
    assert learner.poll() is None, "it has left just now"
    monkeypatch.setattr(node_evaluator, "AWAY_SECONDS", 0)
    with pytest.raises(WorkerError, match="the own one is given up"):
        learner.poll()


RESULTS = [(), (1, [1.0], [1, 1], "x"), (1, ["a", 1.0], [1, 1], "x"), (1, [10**400, 1.0], [1, 1], "x")]


@pytest.mark.parametrize("args", [*RESULTS, (1, [1.0, 1.0], [1, 1], 5), (1, None, [1, 1], "x")])
def test_a_malformed_result_is_dropped(nodes, evaluators, tape, args):
    hub, _, remote = nodes
    learner, add = evaluators
    end = add(remote)
    learner.start(nn.Linear(2, 1))
    run_until(has_snapshot(end), hub, remote)
    remote.send(PLAYED, *args)
    run_until(lambda: tape.messages, hub)
    assert learner._result is None
    assert "malformed message evaluator.played dropped" in tape.messages[0]
    remote.send(PLAYED, 1, [1.0, 1.0], [1, 1], "x")
    run_until(lambda: learner._result, hub)


@pytest.mark.parametrize("seconds", [math.inf, 0.3])
def test_the_games_of_a_standalone_evaluator_end_with_the_run_and_with_the_time(seconds):
    settings = train_task.Args(env_id="CartPole-v1", eval_episodes=1_000_000)
    looks, interrupted = itertools.count(), seconds == math.inf
    end = InlineEvaluator(settings, lambda: interrupted and next(looks) > 50)
    closing, envs = end.closing, []
    end.closing = lambda env: envs.append(env) or closing(env)
    end.start(A3CSetup(settings).net)
    assert end.wait(seconds) is None
    assert [env.unwrapped.closed for env in envs] == [True]
    interrupted = False
    assert end.take() is not None, "it has no result yet"


def raises(self, action):
    raise OSError("one at a time")


def test_an_error_of_a_standalone_evaluators_environment_is_one_of_the_evaluator(register):
    settings = train_task.Args(env_id=register(changes={"step": raises}))
    end = InlineEvaluator(settings, lambda: False)
    end.start(A3CSetup(settings).net)
    with pytest.raises(WorkerError, match=r"(?s)^the evaluator failed:\nTraceback .*one at a time"):
        end.wait(9.0)
    assert end.take() is None


# ---- what is counted


class Args(CommonArgs):
    @property
    def max_actors(self):
        return self.num_actors + 1


def test_the_mean_return_waits_for_a_collector_from_its_join_until_it_leaves():
    progress = Progress(Args(num_actors=1, num_envs=1))
    games = iter(range(100))

    def end_game(actor=0):
        counted = progress.record_rollout(1, [Episode(next(games), 5)], actor, 0)
        return [episode.episode_return for _, episode in counted]

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
