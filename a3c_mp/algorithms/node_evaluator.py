"""The evaluator of chapter 5: a node that gets snapshots of the weights as messages, or a middleware of the learner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from a3c_mp.errors import WorkerError
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluate import make_policy
from a3c_mp.run.evaluations import PlayedGames
from a3c_mp.run.evaluator import Games
from a3c_mp.task.parallel import JOINED, LEFT, FirstNode, Node

READY, PLAY, PLAYED = "evaluator.ready", "evaluator.play", "evaluator.played"
"""events: of an evaluator that has started (), to it (number, state_dict), of it (number, returns, lengths, sha256)"""


class NodeEvaluator:
    """An evaluator node as the learner sees it, an `evaluations.Evaluator`.

    Snapshots wait until there is an evaluator; one that is replaced, or joins again, gets the same snapshot again.

    Args:
        node: of the learner.
        should_stop: whether a signal has asked the run to stop; ends every wait.
        error: what the evaluator of this machine is given up for, if it is.
    """

    def __init__(self, node: FirstNode, should_stop: Callable[[], bool], error: Callable[[], WorkerError | None]):
        self.node, self.should_stop, self.error = node, should_stop, error
        self._ready: list[str] = []  # nodes that can evaluate; the first one does
        self._number, self._state = 0, dict[str, Tensor]()  # of the snapshot; empty if none waits for its result
        self._result: PlayedGames | None = None
        node.handle(READY, self._on_ready)
        node.handle(PLAYED, self._on_played)
        node.handle(LEFT, self._on_left)

    def start(self, net: nn.Module) -> None:
        self._number, self._state = self._number + 1, dict(net.state_dict())
        self._send()

    def poll(self) -> PlayedGames | None:
        if not self._ready and (error := self.error()) is not None:
            raise error
        result, self._result = self._result, None
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        deadline = math.inf if math.isinf(seconds) else time.monotonic() + seconds
        while (result := self.poll()) is None and time.monotonic() < deadline and not self.should_stop():
            self.node.wait()
        return result

    def close(self) -> None:
        pass

    def _send(self) -> None:
        if self._state and self._ready:
            self.node.send(PLAY, self._number, self._state, to=self._ready[0])

    def _on_ready(self, sender: str) -> None:
        if sender not in self._ready:
            self._ready.append(sender)
        if sender == self._ready[0]:
            self._send()

    def _on_left(self, sender: str) -> None:
        if sender in self._ready:
            was_first = sender == self._ready[0]
            self._ready.remove(sender)
            if was_first:
                self._send()

    def _on_played(self, sender: str, number: int, returns: list[float], lengths: list[int], sha256: str) -> None:
        self.node.record_result(sender)
        if number == self._number and self._state:
            self._result, self._state = PlayedGames(returns, lengths, sha256), {}


class EvaluatorEnd:
    """The evaluator's end: snapshots in, results out.

    Args:
        node: of the evaluator.
        games: that it plays.
        net: on the CPU; gets the weights.
    """

    def __init__(self, node: Node, games: Games, net: ActorCritic):
        self.node, self.games, self.net = node, games, net
        self._snapshot: tuple[int, Mapping[str, Tensor]] | None = None
        self._number = 0
        node.handle(PLAY, self._on_play)
        node.handle(JOINED, self._on_joined)
        node.send(READY, to="node.0")

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

    def _on_play(self, sender: str, number: int, state: Mapping[str, Tensor]) -> None:
        self._snapshot = number, state

    def _on_joined(self, sender: str) -> None:
        if sender == "node.0":  # again, after the connection was lost
            self.node.send(READY, to="node.0")


class InlineEvaluator:
    """Both ends in one process: an `evaluations.Evaluator` whose games a middleware plays.

    Args:
        node: of this process.
        games: that it plays.
    """

    def __init__(self, node: Node, games: Games):
        self.node, self.games = node, games
        self._net: Any = None  # of a snapshot, until its result is there
        self._result: PlayedGames | None = None

    def start(self, net: nn.Module) -> None:
        self._net = net

    def take(self) -> ActorCritic | None:
        """Return the net of a snapshot that has not been evaluated; None if there is none."""
        return self._net

    def play(self, net: ActorCritic) -> PlayedGames:
        """Play all games, each time the same ones."""
        return _play(self.node, self.games, net)

    def send(self, played: PlayedGames) -> None:
        """Keep the result for the learner."""
        self._net = None  # first: once the result is there, another thread may start the next one
        self._result = played

    def poll(self) -> PlayedGames | None:
        result, self._result = self._result, None
        return result

    def wait(self, seconds: float) -> PlayedGames | None:
        if self._net is not None:  # its middleware has not had its turn since
            self.send(self.play(self._net))
        return self.poll()

    def close(self) -> None:
        pass


Evaluator = EvaluatorEnd | InlineEvaluator
"""an evaluator as its middleware sees it"""


def _play(node: Node, games: Games, net: ActorCritic) -> PlayedGames:
    played = games.play(net, make_policy, node)
    node.close()  # each evaluation makes new environments, so that all of them play the same games
    returns, lengths = [game.episode_return for game in played], [game.length for game in played]
    return PlayedGames(returns, lengths, sha256_of_weights(net.state_dict()) or "")
