"""State from which a deterministic run rebuilds each actor, bit for bit: its action log and what else it carries.

A deterministic actor sends, in a slot beside that of its data, the actions it took, which games ended, and what else
its successor cannot repeat (`carried`: the logits of the next action, incomplete n-step returns, ...). The learner
keeps the newest of each actor, and the log of its games. An actor is rebuilt from these after a resume, and when it
is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.errors import ConfigError
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Filled, RestartMessage, WorkerOptions, Workers
from wrappers import GameLog, obs_hashes, seeding_of


class ActorState(NamedTuple):
    """What an actor is rebuilt from."""

    rollouts: int  # collected so far
    games: dict[str, Any]  # `GameLog.state_dict`
    carried: dict[str, np.ndarray]  # what its last message carried; empty if its games could not be rebuilt
    messages: int  # taken of the rollout in progress, where a rollout makes several


ActorReport = tuple[int, dict[str, Tensor]]
"""actor, fields of its slot"""


class ActorStates:
    """The states of all actors of a run; empty, and all calls without effect, unless the run is deterministic.

    Args:
        args: settings of the chapter.
        action_space: of one environment, as actions are stored.
        steps: T, of one rollout or block.
        carried: shapes and dtypes of what else a successor needs.
        start: agent steps of the run when its actors start; seeds of environments and sampling follow from it.
        own: the actors of this learner; several learners share the states, but not the slots.
        slots_per_actor: messages of an actor in flight.
        messages: that an actor sends of each rollout.

    Raises:
        ConfigError: there is too little memory.
    """

    def __init__(
        self, args: CommonArgs, action_space: gymnasium.Space, steps: int, carried: Spec, *, start: int,
        own: range | None = None, slots_per_actor: int = 1, messages: int = 1,
    ):  # fmt: skip
        self.args, self.start, self.slots_per_actor, self.messages = args, start, slots_per_actor, messages
        self.own = range(args.num_actors) if own is None else own
        self.first = self.own.start
        self.slots: Slots | None = None
        self._sent = dict.fromkeys(range(args.num_actors), 0)  # messages of its rollout that were taken
        self._rollouts = dict.fromkeys(range(args.num_actors), 0)
        self._carried: dict[int, dict[str, Tensor]] = {}
        self._games: list[GameLog] = []
        if args.deterministic:
            seeding, num_envs = seeding_of(args.env_id), args.num_envs
            try:
                self.slots = Slots(_spec(num_envs, action_space, steps) | carried, len(self.own) * slots_per_actor)
            except MemoryError as error:
                raise ConfigError("num-envs", num_envs, str(error), "lower it, or --num-actors") from error
            self._games = [GameLog(num_envs, seeding, keep_actions=True) for _ in range(args.num_actors)]

    def __getstate__(self) -> dict[str, Any]:
        """What travels to an actor: the slots alone."""
        return {"slots": self.slots}

    # ---- what an actor calls

    def write(self, slot: int, to_write: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Put what a successor needs, `to_write(*args)`, beside the data of a slot."""
        if self.slots is not None:
            fields = to_write(*args)
            for name, place in self.slots[slot].items():
                place.copy_(torch.as_tensor(fields[name]))

    # ---- what the learner calls

    def workers(
        self, target: Callable[..., None], shared: tuple, weights: Weights,
        on_restart: Callable[[RestartMessage], None], in_order: bool | None = None,
    ) -> Workers:  # fmt: skip
        """The supervised processes of this learner's actors, each running `target(channel, args, *shared, states)`.

        With `in_order`, the default of a deterministic run, rounds have one slot of every actor.
        """
        return Workers(
            target,
            len(self.own),
            (self.args, *shared, self),
            states=self,
            options=WorkerOptions(
                slots_per_worker=self.slots_per_actor,
                max_restarts=self.args.max_restarts,
                hang_seconds=self.args.hang_seconds,
                in_order=self.args.deterministic if in_order is None else in_order,
                versions=weights.versions_in_flight(self.slots_per_actor),
                first_actor=self.first,
            ),
            on_restart=on_restart,
        )

    def read(self, filled: Sequence[Filled]) -> list[ActorReport]:
        """What the actors of this learner sent beside a round of slots, copied, where it completes a rollout."""
        found = []
        for worker, slot, _ in filled:
            actor = self.first + worker
            self._sent[actor] = (self._sent[actor] + 1) % self.messages
            if self.slots is not None and self._sent[actor] == 0:
                found.append((actor, {name: field.clone() for name, field in self.slots[slot].items()}))
        return found

    def advance(self, reports: Iterable[ActorReport]) -> None:
        """Take in what actors sent; also those of other learners."""
        for actor, fields in reports:
            self._games[actor].extend(fields.pop("action").numpy(), fields.pop("done").numpy())
            self._carried[actor] = fields
            self._rollouts[actor] += 1

    def take(self, filled: Sequence[Filled]) -> bool:
        """Read a round of slots and advance; returns whether it completed a rollout of any actor."""
        self.advance(self.read(filled))
        return any(self._sent[self.first + worker] == 0 for worker, _, _ in filled)

    def of(self, actor: int) -> ActorState | None:
        """What an actor is to be rebuilt from; None if the run is not deterministic."""
        if self.slots is None:
            self._sent[actor] = 0  # it starts with a rollout of its own
            return None
        games = self._games[actor].state_dict()
        carried = {name: field.numpy() for name, field in self._carried.get(actor, {}).items()}
        return ActorState(self._rollouts[actor], games, carried, self._sent[actor])

    def start_new_games(self, actor: int) -> None:
        """The games of an actor could not be rebuilt: it has left them and plays others."""
        self._games[actor].start_new_games()
        self._sent[actor] = 0
        self._carried.pop(actor, None)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        actors = []
        for actor, games in enumerate(self._games):
            log = {name: torch.as_tensor(value) for name, value in games.state_dict().items() if value is not None}
            counts = [self._rollouts[actor], self._sent[actor]]
            actors.append({"games": log, "counts": counts, "carried": self._carried.get(actor, {})})
        return {"start": self.start, "actors": actors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Raises ValueError for other numbers of actors or environments."""
        if len(state["actors"]) != len(self._games):
            raise ValueError(f"it has {len(state['actors'])} actors, not {len(self._games)}")
        self.start = state["start"]
        for actor, saved in enumerate(state["actors"]):
            arrays = {name: tensor.numpy() for name, tensor in saved["games"].items()}
            self._games[actor].load_state_dict({"actions": None, **arrays})
            self._rollouts[actor], self._sent[actor] = saved["counts"]
            if saved["carried"]:
                self._carried[actor] = {name: tensor.clone() for name, tensor in saved["carried"].items()}


def _spec(num_envs: int, action_space: gymnasium.Space, steps: int) -> Spec:
    """Shapes and dtypes of what every deterministic actor sends."""
    dtype = np.dtype(np.uint8) if isinstance(action_space, Discrete) and action_space.n <= 256 else action_space.dtype
    return {
        "action": ((steps, num_envs, *(action_space.shape or ())), torch.from_numpy(np.empty(0, dtype)).dtype),
        "done": ((steps, num_envs), torch.bool),
        "obs_hash": ((num_envs,), torch.int64),
        "episode_return": ((num_envs,), torch.float32),
        "episode_length": ((num_envs,), torch.int32),
        "episode_done": ((num_envs,), torch.bool),
    }


class Games:
    """The environments of an actor and the games in them, at their start or rebuilt to where a predecessor stood.

    Args:
        env: from `make_vec_env`, `rebuildable` in a deterministic run.
        channel: to the learner.
    """

    def __init__(self, env: VectorEnv, channel: WorkerChannel):
        self.env, self.stats = env, EpisodeStats(env.num_envs)
        state: ActorState | None = channel.restored
        self.rollouts, self.messages = (state.rollouts, state.messages) if state else (0, 0)
        self.carried = state.carried if state else {}
        self.obs: np.ndarray = env.rebuild(state.games, channel.beat) if state else env.reset()[0]  # type: ignore[attr-defined]
        if not self.carried:
            return
        differing = np.flatnonzero(obs_hashes(self.obs) != self.carried["obs_hash"])
        if len(differing):
            self.obs, self.carried, self.messages = env.start_new_games(), {}, 0  # type: ignore[attr-defined]
            channel.lose_games(f"its environment {differing[0]} does not repeat a game from its seed and its actions")
        else:
            self.stats.restore(self.carried)

    def to_write(self, action: Tensor, done: Tensor, obs: Tensor) -> dict[str, Any]:
        """The fields for `ActorStates.write` that all chapters share: of steps [T, B], and the observations after."""
        return {"action": action, "done": done, "obs_hash": obs_hashes(obs.numpy()), **self.stats.fields()}
