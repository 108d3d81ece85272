"""The evaluator of chapter 5: a node that gets snapshots of the weights as messages, or a middleware of the learner."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from a3c_mp.errors import WorkerError
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluate import make_policy
from a3c_mp.run.evaluation import PlayedGames
from a3c_mp.run.evaluator import EvaluationGames
from a3c_mp.run.run import Run
from a3c_mp.task.events import JOINED, LEFT
from a3c_mp.task.joining import REPORT_NAME, REPORT_RESULT
from a3c_mp.task.node import FirstNode, Node
from a3c_mp.task.wire import WireError

EVALUATOR_READY, PLAY, PLAYED = "evaluator.ready", "evaluator.play", "evaluator.played"
"""events: of an evaluator that has started (host name), to it (number, state_dict), of it (number, returns,
lengths, sha256)"""


class NodeEvaluator:
    """Evaluator nodes as the learner sees them, an `evaluation.Evaluator`.

    One of another machine goes first, so that the learner's machine has its cores for training; that of the learner's
    machine is its spare. Snapshots wait until there is an evaluator; where one is lost, another one, or the same once
    it is back, gets the same snapshot again.

    Args:
        node: of the learner.
        own: name of the evaluator of the learner's machine.
        run: gets log lines; a signal to it ends every wait.
        error: what the evaluator of this machine is given up for, if it is.
        others: whether evaluators of other machines can join.
    """

    def __init__(self, node: FirstNode, own: str, run: Run, error: Callable[[], WorkerError | None], others: bool):
        self.node, self.own, self.run, self.error, self.others = node, own, run, error, others
        self._ready: list[str] = []  # names of the nodes that could evaluate
        self._name: str | None = None  # of the node that evaluates the snapshot
        self._number, self._state = 0, dict[str, Tensor]()  # of the snapshot; empty if none waits for its result
        self._result: PlayedGames | None = None
        node.handle(EVALUATOR_READY, self._on_ready, [str])
        node.handle(PLAYED, self._on_played, [int, list, list, str])
        node.handle(LEFT, self._on_left, [])

    def start(self, net: nn.Module) -> None:
        self._number, self._state = self._number + 1, dict(net.state_dict())
        self._send()

    def poll(self) -> PlayedGames | None:
        result, self._result = self._result, None
        if result is None and not self._ready:
            own = self.node.child(self.own)
            if (error := self.error()) is not None:
                raise error
            if not self.others and own is not None and own.is_done:
                raise WorkerError("the evaluator ended with the task and sent no result")
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        deadline = math.inf if math.isinf(seconds) else time.monotonic() + seconds
        while (result := self.poll()) is None and time.monotonic() < deadline and not self.run.is_interrupted():
            self.node.wait()
        return result

    def close(self) -> None:
        pass

    def _send(self) -> None:
        """Give the snapshot to an evaluator, unless one has it."""
        if self._state and self._name is None and self._ready:
            self._name = next((name for name in self._ready if name != self.own), self.own)
            self.node.send(PLAY, self._number, self._state, to=self._name)

    def _on_ready(self, sender: str, host: str) -> None:
        """An evaluator has started, or has lost its connection and joined again."""
        is_known = sender in self._ready
        self._forget(sender)
        if sender != self.own and not is_known:
            self.run.log.info(f"evaluator joined from {host!r:.80} ({sender}); it plays the next evaluations")
        self._ready.append(sender)
        self._send()

    def _on_left(self, sender: str) -> None:
        if sender in self._ready and sender != self.own:
            self.run.log.info(f"evaluator left ({sender})")
        self._forget(sender)
        self._send()

    def _forget(self, sender: str) -> None:
        """Take an evaluator, and the snapshot that it may have, as lost."""
        if sender in self._ready:
            self._ready.remove(sender)
        if sender == self._name:
            self._name = None

    def _on_played(self, sender: str, number: int, returns: list[float], lengths: list[int], sha256: str) -> None:
        if sender != self._name or number != self._number or not self._state:
            return  # the snapshot has gone to another evaluator meanwhile
        if not len(returns) == len(lengths) == self.run.args.eval_episodes:
            raise WireError(f"{len(returns)} returns and {len(lengths)} lengths")
        if not all(type(value) in (int, float) for value in (*returns, *lengths)):
            raise WireError("returns or lengths are no numbers")
        try:
            returns = [float(value) for value in returns]
        except OverflowError as error:  # an int of any size
            raise WireError("a return is too large") from error
        if not all(0 < length < 2**63 for length in lengths):
            raise WireError("a length is out of range")
        self.node.record_result(sender)
        self._result, self._state, self._name = PlayedGames(returns, lengths, sha256), {}, None


class EvaluatorChannel:
    """The evaluator's end: snapshots in, results out.

    Args:
        node: of the evaluator.
        games: that it plays.
        net: on the CPU; gets the weights.
    """

    def __init__(self, node: Node, games: EvaluationGames, net: ActorCritic):
        self.node, self.games, self.net = node, games, net
        self._snapshot: tuple[int, Mapping[str, Tensor]] | None = None
        self._number = 0
        node.handle(PLAY, self._on_play, [int, dict], sender="node.0")
        node.handle(JOINED, self._on_joined)
        self._say_ready()

    def take(self) -> ActorCritic | None:
        """Wait for a snapshot, and return the net with its weights; None if the task ends meanwhile."""
        while self._snapshot is None and not self.node.finishing:
            self.node.wait()
        if self._snapshot is None:
            return None
        (self._number, state), self._snapshot = self._snapshot, None
        self.net.load_state_dict(state)
        return self.net

    def play(self, net: ActorCritic) -> PlayedGames:
        """Play all games, each time the same ones."""
        return _play(self.node, self.games, net)

    def send(self, played: PlayedGames) -> None:
        """Report the result to the learner."""
        self.node.send(PLAYED, self._number, *played, to="node.0")
        self.node.report(REPORT_RESULT)

    def _on_play(self, sender: str, number: int, state: Mapping[str, Tensor]) -> None:
        self._snapshot = number, state

    def _on_joined(self, sender: str) -> None:
        if sender == "node.0":  # again, after the connection was lost
            self._snapshot = None
            self._say_ready()

    def _say_ready(self) -> None:
        self.node.report(REPORT_NAME, "evaluator")
        self.node.send(EVALUATOR_READY, socket.gethostname(), to="node.0")


class InlineEvaluator:
    """Both ends in one process: an `evaluation.Evaluator` whose games a middleware plays.

    Args:
        node: of this process.
        games: that it plays.
        is_interrupted: whether the run is to end, so that no game is to be waited for.
    """

    def __init__(self, node: Node, games: EvaluationGames, is_interrupted: Callable[[], bool]):
        self.node, self.games, self.is_interrupted = node, games, is_interrupted
        self._net: Any = None  # of a snapshot, until its result is there
        self._result: PlayedGames | None = None

    def start(self, net: nn.Module) -> None:
        self._net = net

    def take(self) -> ActorCritic | None:
        """Return the net of a snapshot that has not been evaluated; None if there is none, or the run is to end."""
        return None if self.is_interrupted() else self._net

    def play(self, net: ActorCritic, seconds: float = math.inf) -> PlayedGames | None:
        """Play all games, each time the same ones; None if that takes longer, or if the run is to end meanwhile."""
        deadline = time.monotonic() + seconds

        def on_step() -> None:
            if self.is_interrupted() or time.monotonic() > deadline:
                raise _Interrupted

        try:
            return _play(self.node, self.games, net, on_step)
        except _Interrupted:
            return None

    def send(self, played: PlayedGames) -> None:
        """Keep the result for the learner."""
        self._net = None  # first: once the result is there, another thread may start the next one
        self._result = played

    def poll(self) -> PlayedGames | None:
        result, self._result = self._result, None
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        # Without a result, its middleware has not had its turn since.
        if self._net is not None and (played := self.play(self._net, seconds)) is not None:
            self.send(played)
        return self.poll()

    def close(self) -> None:
        pass


Evaluator = EvaluatorChannel | InlineEvaluator
"""an evaluator as its middleware sees it"""


class _Interrupted(Exception):
    """The games are not waited for."""


class _Upkeep(NamedTuple):
    """A channel for `EvaluationGames.play` that does more in each step."""

    closing: Callable[[Any], Any]
    beat: Callable[[], None]
    starting: Callable[[], None]


def _play(
    node: Node, games: EvaluationGames, net: ActorCritic, on_step: Callable[[], None] = lambda: None
) -> PlayedGames:
    def beat() -> None:
        node.beat()
        on_step()

    try:
        played = games.play(net, make_policy, _Upkeep(node.closing, beat, node.starting))
    finally:
        node.close()  # each evaluation makes new environments, so that all of them play the same games
    returns, lengths = [game.episode_return for game in played], [game.length for game in played]
    return PlayedGames(returns, lengths, sha256_of_weights(net.state_dict()) or "")
