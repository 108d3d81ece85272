"""Actor states: what a deterministic run saves of each actor, to rebuild it bit for bit after a crash or a resume.

In a state slot beside each data slot, a deterministic actor sends the actions it took, which games ended, and what its
successor (the process that replaces it) cannot recompute from them (`successor_state`: logits of the next action,
incomplete n-step returns, ...). For each actor, the learner keeps the newest `successor_state` and the log of all
actions in its games.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.errors import ConfigError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.wrappers import GameLog, seeding_of


@dataclass
class ActorState:
    """State of one actor, from which a deterministic run rebuilds it."""

    games: Any = None  # a `GameLog`, if the run is deterministic
    rollouts: int = 0  # collected so far
    messages: int = 0  # that the learner took of the rollout in progress, where a rollout makes several
    successor_state: dict[str, np.ndarray] = field(default_factory=dict)
    """of its last message; empty if its games could not be rebuilt"""


ActorReport = tuple[int, dict[str, np.ndarray]]  # number of the actor, fields of its state slot


class ActorLayout(NamedTuple):
    """Shapes and counts of the states that a chapter's actors send in deterministic runs."""

    action_space: gymnasium.Space  # of one environment
    steps: int  # T, of one rollout or block
    successor_state: Spec  # shapes and dtypes of what a successor needs besides the game log
    slots_per_actor: int = 1  # messages of an actor in flight
    messages: int = 1  # of an actor for each rollout


class ResumeStates:
    """States of all actors of a deterministic run; in other runs only messages are counted. Actors `write`.

    Seeds of environments and sampling depend on `start`, the agent steps of the run when its actors start. All learners
    of a `group` keep the same states, and each has slots for its own actors. Raises ConfigError if memory is too small.
    """

    def __init__(self, args: CommonArgs, layout: ActorLayout, *, start: int, group: LearnerGroup | None = None):
        self.layout, self.start, self.seed = layout, start, args.seed
        self.own = (group or LearnerGroup()).own_share(args.max_actors)
        self.actors = [ActorState() for _ in range(args.max_actors)]
        self.slots: Any = None  # `Slots` in deterministic runs
        if args.deterministic:
            seeding = seeding_of(args.env_id)
            for state in self.actors:
                state.games = GameLog(args.num_envs, seeding)
            try:
                self.slots = Slots(_spec(args.num_envs, layout), len(self.own) * layout.slots_per_actor)
            except MemoryError as error:
                raise ConfigError("num-envs", args.num_envs, str(error), "lower it, or --num-actors") from error

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the slots alone: an actor needs nothing else."""
        return {"slots": self.slots}

    def write(self, slot: int, fields: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Write `fields(*args)`, the state of an actor, into the state slot of a data slot; deterministic runs only."""
        if self.slots is not None:
            found = fields(*args)
            for name, place in self.slots[slot].items():
                place.numpy()[...] = found[name]

    def read(self, filled: Sequence[Filled]) -> list[ActorReport]:
        """Copies of the states sent with a round of slots, of the actors whose rollout is complete with it."""
        reports = []
        for worker, slot, _ in filled:
            state = self.actors[self.own[worker]]
            state.messages = (state.messages + 1) % self.layout.messages
            if self.slots is not None and state.messages == 0:
                fields = {name: place.numpy().copy() for name, place in self.slots[slot].items()}
                reports.append((self.own[worker], fields))
        return reports

    def advance(self, reports: Iterable[ActorReport]) -> None:
        """Update the game logs and states of actors, also those of other learners."""
        for actor, fields in reports:
            state = self.actors[actor]
            state.games.extend(fields.pop("action"), fields.pop("done"))
            state.successor_state = fields
            state.rollouts += 1

    def completes_rollout(self, filled: Sequence[Filled]) -> bool:
        """Whether a round that was read contains the last message of any actor's rollout."""
        return any(self.actors[self.own[worker]].messages == 0 for worker, _, _ in filled)

    def record_start(self, actor: int) -> ActorState | None:
        """Record that a process of an actor starts; return the state to rebuild it from, None if not deterministic."""
        state = self.actors[actor]
        if self.slots is None:
            state.messages = 0  # it starts with a new rollout
            return None
        return copy.deepcopy(state)  # an actor may be a thread of this process

    def forget(self, actor: int) -> None:
        """Record that an actor could not rebuild its games and plays new ones."""
        state = self.actors[actor]
        state.games.start_new_games()
        state.messages, state.successor_state = 0, {}

    def state_dict(self) -> dict[str, Any]:
        actors = []
        for state in self.actors if self.slots is not None else []:
            parts = state.games.state_dict(), state.successor_state
            games, successor_state = ({name: torch.from_numpy(array) for name, array in p.items()} for p in parts)
            counts = [state.rollouts, state.messages]
            actors.append({"games": games, "counts": counts, "successor_state": successor_state})
        return {"start": self.start, "seed": self.seed, "messages": self.layout.messages, "actors": actors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`. Raises ValueError for other settings that the state of an actor depends on."""
        actors = self.actors if self.slots is not None else []
        if len(state["actors"]) != len(actors):
            raise ValueError(f"it has {len(state['actors'])} actors, not {len(actors)}")
        if actors and (seed := state.get("seed", self.seed)) != self.seed:
            raise ValueError(f"its games are those of seed {seed}, not of {self.seed}")
        for saved in state["actors"]:
            for name, tensor in saved["successor_state"].items():
                if tensor.shape != (shape := self.slots.spec[name][0]):
                    raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
            if saved["counts"][1] and state["messages"] != self.layout.messages:
                raise ValueError(f"a rollout was sent in {state['messages']} messages, not {self.layout.messages}")
        self.start = state["start"]
        for actor, saved in zip(actors, state["actors"], strict=True):
            actor.games.load_state_dict({name: tensor.numpy() for name, tensor in saved["games"].items()})
            actor.rollouts, actor.messages = saved["counts"]
            actor.successor_state = {name: tensor.numpy().copy() for name, tensor in saved["successor_state"].items()}


def _spec(num_envs: int, layout: ActorLayout) -> Spec:
    """Shapes and dtypes of a state slot."""
    space, steps = layout.action_space, (layout.steps, num_envs)
    dtype = np.dtype(np.uint8) if isinstance(space, Discrete) and space.n <= 256 else space.dtype
    stats = EpisodeStats(num_envs).fields().items()
    return {
        "action": ((*steps, *(space.shape or ())), torch.from_numpy(np.empty(0, dtype)).dtype),
        "done": (steps, torch.bool),
        "obs_hash": ((num_envs,), torch.int64),
        **{name: (array.shape, torch.from_numpy(array).dtype) for name, array in stats},
        **layout.successor_state,
    }
