"""Actor states: what a deterministic run saves of each actor, to rebuild it bit for bit after a crash or a resume.

In a state slot beside each data slot, a deterministic actor sends the actions it took, which games ended, and what its
successor (the process that replaces it) cannot recompute from them (`successor_state`: logits of the next action,
incomplete n-step returns, ...). For each actor, the learner keeps the newest `successor_state` and the log of all
actions in its games.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled
from a3c_mp.processes.slots import Slots, Spec
from wrappers import GameLog, seeding_of


class ActorState(NamedTuple):
    """Saved state of one actor: its game log, and the state that it sent last."""

    rollouts: int  # collected so far
    games: dict[str, Any]  # `GameLog.state_dict`
    successor_state: dict[str, np.ndarray]  # of its last message; empty if its games could not be rebuilt
    messages: int  # that the learner took of the rollout in progress, where a rollout makes several


ActorReport = tuple[int, dict[str, Tensor]]
"""number of the actor, fields of its state slot"""


class ActorLayout(NamedTuple):
    """Shapes and counts of the states that a chapter's actors send in deterministic runs."""

    action_space: gymnasium.Space  # of one environment
    steps: int  # T, of one rollout or block
    successor_state: Spec  # shapes and dtypes of what a successor needs besides the game log
    slots_per_actor: int = 1  # messages of an actor in flight
    messages: int = 1  # of an actor for each rollout


class ResumeStates:
    """States of all actors of a deterministic run. In other runs it is empty, and its calls do nothing.

    Args:
        args: settings of the chapter.
        layout: shapes and counts of what actors send.
        start: agent steps of the run when its actors start; seeds of environments and sampling depend on it.
        group: learners that keep the same states; each has slots for its own actors only.

    Raises:
        ConfigError: too little shared memory.
    """

    def __init__(self, args: CommonArgs, layout: ActorLayout, *, start: int, group: LearnerGroup | None = None):
        self.args, self.layout, self.start = args, layout, start
        self.group = group or LearnerGroup()
        self.own = self.group.own_share(args.max_actors)
        self.slots: Slots | None = None
        self._sent = dict.fromkeys(range(args.max_actors), 0)  # messages taken of its rollout
        self._rollouts = dict.fromkeys(range(args.max_actors), 0)
        self._successor_state: dict[int, dict[str, Tensor]] = {}
        self._games: list[GameLog] = []
        if args.deterministic:
            seeding, num_envs = seeding_of(args.env_id), args.num_envs
            try:
                self.slots = Slots(_spec(num_envs, layout), len(self.own) * layout.slots_per_actor)
            except MemoryError as error:
                raise ConfigError("num-envs", num_envs, str(error), "lower it, or --num-actors") from error
            self._games = [GameLog(num_envs, seeding) for _ in range(args.max_actors)]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the slots alone: an actor needs nothing else."""
        return {"slots": self.slots}

    # ---- called by actors

    def write(self, slot: int, fields: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Write `fields(*args)`, the state of an actor, into the state slot of a data slot; deterministic runs only."""
        if self.slots is not None:
            found = fields(*args)
            for name, place in self.slots[slot].items():
                place.copy_(torch.as_tensor(found[name]))

    # ---- called by the learner

    def store(self, slot: int, fields: Mapping[str, np.ndarray]) -> None:
        """Write a state that came as a message into the state slot of a data slot."""
        if self.slots is not None:
            for name, place in self.slots[slot].items():
                place.numpy()[...] = fields[name]

    def read(self, filled: Sequence[Filled]) -> list[ActorReport]:
        """Return copies of the states sent with a round of slots, of the actors whose rollout is complete with it."""
        found = []
        for worker, slot, _ in filled:
            actor = self.own[worker]
            self._sent[actor] = (self._sent[actor] + 1) % self.layout.messages
            if self.slots is not None and self._sent[actor] == 0:
                found.append((actor, {name: field.clone() for name, field in self.slots[slot].items()}))
        return found

    def advance(self, reports: Iterable[ActorReport]) -> None:
        """Update the game logs and states of actors, also those of other learners."""
        for actor, fields in reports:
            self._games[actor].extend(fields["action"].numpy(), fields["done"].numpy())
            self._successor_state[actor] = {
                name: field for name, field in fields.items() if name not in ("action", "done")
            }
            self._rollouts[actor] += 1

    def completes_rollout(self, filled: Sequence[Filled]) -> bool:
        """Whether a round that was read contains the last message of any actor's rollout."""
        return any(self._sent[self.own[worker]] == 0 for worker, _, _ in filled)

    def record_start(self, actor: int) -> ActorState | None:
        """Record that a process of an actor starts; return the state to rebuild it from, None if not deterministic."""
        if self.slots is None:
            self._sent[actor] = 0  # it starts with a new rollout
            return None
        games = self._games[actor].state_dict()
        successor_state = {name: field.numpy() for name, field in self._successor_state.get(actor, {}).items()}
        return ActorState(self._rollouts[actor], games, successor_state, self._sent[actor])

    def forget(self, actor: int) -> None:
        """Record that an actor could not rebuild its games and plays new ones."""
        self._games[actor].start_new_games()
        self._sent[actor] = 0
        self._successor_state.pop(actor, None)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        actors = []
        for actor, games in enumerate(self._games):
            log = {name: torch.as_tensor(value) for name, value in games.state_dict().items() if value is not None}
            counts = [self._rollouts[actor], self._sent[actor]]
            actors.append({"games": log, "counts": counts, "successor_state": self._successor_state.get(actor, {})})
        return {"start": self.start, "messages": self.layout.messages, "actors": actors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`.

        Raises:
            ValueError: for other numbers of actors or environments; or for other settings that the state of an actor
                depends on, such as the n of n-step transitions.
        """
        if len(state["actors"]) != len(self._games):
            raise ValueError(f"it has {len(state['actors'])} actors, not {len(self._games)}")
        spec, messages = _spec(self.args.num_envs, self.layout), state["messages"]
        for saved in state["actors"]:
            for name, tensor in saved["successor_state"].items():
                if name in spec and tensor.shape != spec[name][0]:
                    raise ValueError(f"{name} is {list(tensor.shape)}, not {list(spec[name][0])}")
            if saved["counts"][1] and messages != self.layout.messages:
                raise ValueError(f"a rollout was sent in {messages} messages, not {self.layout.messages}")
        self.start = state["start"]
        for actor, saved in enumerate(state["actors"]):
            arrays = {name: tensor.numpy() for name, tensor in saved["games"].items()}
            self._games[actor].load_state_dict({"actions": None, **arrays})
            self._rollouts[actor], self._sent[actor] = saved["counts"]
            if saved["successor_state"]:
                self._successor_state[actor] = {
                    name: tensor.clone() for name, tensor in saved["successor_state"].items()
                }


def _spec(num_envs: int, layout: ActorLayout) -> Spec:
    """Return shapes and dtypes of a state slot."""
    space, steps = layout.action_space, (layout.steps, num_envs)
    dtype = np.dtype(np.uint8) if isinstance(space, Discrete) and space.n <= 256 else space.dtype
    return {
        "action": ((*steps, *(space.shape or ())), torch.from_numpy(np.empty(0, dtype)).dtype),
        "done": (steps, torch.bool),
        "obs_hash": ((num_envs,), torch.int64),
        "episode_return": ((num_envs,), torch.float32),
        "episode_length": ((num_envs,), torch.int32),
        "episode_done": ((num_envs,), torch.bool),
        "steps_since_reward": ((num_envs,), torch.int32),
        **layout.successor_state,
    }
