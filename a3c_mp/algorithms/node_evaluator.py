"""The evaluator of chapter 5: a node that gets snapshots of the weights as messages, or a middleware of the learner."""

import math
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from a3c_mp.config import CommonArgs
from a3c_mp.errors import Stopped, WorkerError
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.processes.pool import Closing
from a3c_mp.run.evaluate import make_policy, play_evaluation
from a3c_mp.run.evaluation import PlayedGames
from a3c_mp.run.run import Run
from a3c_mp.seeds import global_generators_kept
from a3c_mp.task.endpoint import node_name
from a3c_mp.task.node import REPORT_NAME, REPORT_RESULT, FirstNode, Node
from a3c_mp.task.wire import JOINED, LEFT, WireError

EVALUATOR_READY, PLAY, PLAYED = "evaluator.ready", "evaluator.play", "evaluator.played"
"""events: of an evaluator that has started (host name), to it (number, state_dict), of it (number, returns,
lengths, sha256)"""
FROM_EVALUATORS = EVALUATOR_READY, PLAYED
AWAY_SECONDS = 60.0  # in which an evaluator of another machine may join again, where there is no other one


class NodeEvaluator:
    """Evaluator nodes as the learner sees them, an `evaluation.Evaluator`.

    Node `own` is that of the learner's machine. Those of `others`, if they can join, go first, so that the learner's
    machine has its cores for training. Snapshots wait until there is an evaluator; where one is lost, another one, or
    the same once it is back, gets the same snapshot again.
    """

    def __init__(self, run: Run, own: int, others: bool):
        self.run, self.own, self.own_name, self.others = run, own, node_name(own), others
        self._ready: list[str] = []  # names of the nodes that could evaluate, the own one last
        self._name: str | None = None  # of the node that evaluates the snapshot
        self._number, self._state = 0, dict[str, Tensor]()  # of the snapshot; empty if none waits for its result
        self._result: PlayedGames | None = None
        self._error: WorkerError | None = None  # that the own one is given up for
        self._left = -math.inf  # when one of the others did

    def connect(self, node: FirstNode) -> None:
        """Take the messages of evaluators from now on, at the learner's node."""
        self.node = node
        node.handle(EVALUATOR_READY, self._on_ready, [str])
        node.handle(PLAYED, self._on_played, [int, list, list, str])
        node.handle(LEFT, self._on_left)

    def on_lost(self, error: WorkerError) -> None:
        self._error = error

    def start(self, net: nn.Module) -> None:
        self._number, self._state = self._number + 1, dict(net.state_dict())
        self._send()

    def poll(self) -> PlayedGames | None:
        result, self._result = self._result, None
        if result is None and not self._ready and time.monotonic() - self._left > AWAY_SECONDS:
            if self._error is not None:
                raise self._error
            if not self.others and self.node.supervisor.children[self.own - 1].is_done:
                raise WorkerError("the evaluator ended with the task and sent no result")
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        deadline = time.monotonic() + seconds
        while (result := self.poll()) is None and time.monotonic() < deadline and not self.run.is_interrupted():
            self.node.wait()
        return result

    def close(self) -> None:
        self._state = {}

    def _send(self) -> None:
        """Give the snapshot to an evaluator, unless one has it."""
        if self._state and self._name is None and self._ready:
            self._name = self._ready[0]
            self.node.router.allow(self._name, sum(value.nbytes for value in self._state.values()))
            self.node.send(PLAY, self._number, self._state, to=self._name)

    def _on_ready(self, sender: str, host: str) -> None:
        """An evaluator has started, or has lost its connection and joined again."""
        if sender != self.own_name:
            if sender in self._ready:
                raise WireError("it was ready already")
            failed = self.run.progress.evals.has_failed
            what = "there are no further evaluations" if failed else "it plays the next evaluations"
            self.run.log.info(f"evaluator joined from {host!r:.80} ({sender}); {what}")
        self._forget(sender)
        self._ready.insert(len(self._ready) if sender == self.own_name else 0, sender)
        self._send()

    def _on_left(self, sender: str) -> None:
        if sender in self._ready and sender != self.own_name:
            self.run.log.info(f"evaluator left ({sender})")
            self._left = time.monotonic()
        self._forget(sender)
        self._send()

    def _forget(self, sender: str) -> None:
        """Take an evaluator, and the snapshot that it may have, as lost."""
        self._ready = [name for name in self._ready if name != sender]
        self._name = None if sender == self._name else self._name

    def _on_played(self, sender: str, number: int, returns: list[float], lengths: list[int], sha256: str) -> None:
        if sender != self._name or number != self._number or not self._state:
            self.node.router.record_fault(sender)
            return  # the snapshot has gone to another evaluator meanwhile
        is_complete = len(returns) == len(lengths) == self.run.args.eval_episodes
        are_valid = all(type(length) is int and 0 < length < 2**63 for length in lengths)
        if not (is_complete and are_valid and all(type(value) is float for value in returns)):
            raise WireError("not the returns and lengths of the games")
        self.node.router.allow(sender, 0)
        self._result, self._state, self._name = PlayedGames(returns, lengths, sha256), {}, None


class EvaluatorChannel:
    """The evaluator's end: snapshots in, results out. `net` is on the CPU and gets the weights."""

    def __init__(self, node: Node, args: CommonArgs, net: ActorCritic):
        self.node, self.args, self.net = node, args, net
        self._snapshot: tuple[int, dict[str, Tensor]] | None = None
        self._number, self._greeting = 0, node.router.greeting
        node.handle(PLAY, self._on_play, [int, dict])
        node.handle(JOINED, self._report_ready)  # again, after the connection was lost
        self._report_ready()

    def take(self) -> ActorCritic | None:
        """Wait for a snapshot, and return the net with its weights; None if the task ends."""
        while self._snapshot is None:
            if self.node.finishing:
                return None
            self.node.wait()
        (self._number, state), self._snapshot = self._snapshot, None
        self.net.load_state_dict(state)
        return self.net

    def play(self, net: ActorCritic) -> None:
        """Play all games, each time the same ones, and send the learner their returns."""
        self.node.send(PLAYED, self._number, *play_evaluation(self.args, net, make_policy, self.node))
        self.node.report(REPORT_RESULT)

    def _on_play(self, sender: str, number: int, state: dict[str, Tensor]) -> None:
        self._snapshot = number, state

    def _report_ready(self, sender: str = "") -> None:
        self._snapshot = None
        self.node.report(REPORT_NAME, "evaluator")
        if self.node.router.greeting == self._greeting:  # else it is another task, see `JoinedNode.look`
            self.node.send(EVALUATOR_READY, socket.gethostname())


class InlineEvaluator(Closing):
    """Both ends in one process: an `evaluation.Evaluator` whose games a middleware plays."""

    def __init__(self, args: CommonArgs, is_interrupted: Callable[[], bool]):
        self.args, self.is_interrupted, self._deadline = args, is_interrupted, math.inf
        self._net: Any = None  # of a snapshot, until its result is there
        self._result: PlayedGames | None = None
        self._error: WorkerError | None = None  # of a game that raised, as in an evaluator's process

    def start(self, net: nn.Module) -> None:
        self._net = net

    def take(self) -> ActorCritic | None:
        """Return the net of a snapshot that has not been evaluated; None if there is none, or the run is to end."""
        return None if self.is_interrupted() else self._net

    def play(self, net: ActorCritic) -> None:
        """Play all games, and keep the result for the learner unless the run or the time ends meanwhile."""
        with global_generators_kept():  # the collectors play in this process, too
            try:
                result = play_evaluation(self.args, net, make_policy, self)
            except Stopped:
                return
            except (Exception, SystemExit):  # an environment of the user's own can raise anything
                self._net, self._error = None, WorkerError(f"the evaluator failed:\n{traceback.format_exc()}")
                return
            self._net = None  # first: once the result is there, another thread may start the next one
            self._result = result

    def poll(self) -> PlayedGames | None:
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        self._deadline = time.monotonic() + seconds
        if self._net is not None:  # its middleware has not had its turn since
            self.play(self._net)
        self._deadline = math.inf
        return self.poll()

    def starting(self) -> None:
        pass

    def beat(self) -> None:
        if self.is_interrupted() or time.monotonic() > self._deadline:
            raise Stopped
