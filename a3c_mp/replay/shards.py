"""Shared memory of the replay: ring buffers of frames, actions and n-step returns."""

import copy
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from a3c_mp.processes.slots import Slots, Spec, layout
from a3c_mp.wrappers import MaskedDiscrete

COUNTERS = ("written", "committed", "writable_until")


class Shards:
    """Replay memory shared by all processes: a shard for each actor, a ring buffer (lane) for each environment.

    Environment b of actor s writes lane s * num_envs + b. A row holds one observation's newest frame, the action taken
    there, and the n-step transition that begins there. Rows are numbered 0, 1, 2, ... without end; row r is at place
    r % rows of its lane. An episode's rows are contiguous, so the frame before row r is in row r - 1 if `step[r]` is
    1 or more. A truncated episode has one more row, for its final observation.

    Three counters for each lane synchronize the processes without a lock. Only the lane's writer raises `written` and
    `committed`, only the learner raises `writable_until`, each after the work that it announces:

        written         rows below it are filled; a successor continues here
        committed       the transitions that begin in rows below it are complete
        writable_until  rows below it may be written; the rows they overwrite are no longer sampled

    Args:
        num_shards, num_envs: actors, and environments of each (B).
        rows: length of each lane; the replay holds slightly less than `num_shards * num_envs * rows` transitions.
        stack: observations [stack, ...] are the last `stack` frames of the episode, oldest first, zeros before its
            first, and only the newest is stored. With 1 the whole observation is stored as it is.

    Raises MemoryError, with both sizes, if too little memory is free.
    """

    # What rows hold, as numpy views of shared memory, [lanes, rows, ...]:
    frame: np.ndarray  # the observation's newest frame
    action: np.ndarray  # int64, or float32 [A]
    mask: np.ndarray  # bool [A], actions that the observation's state allows; [0] if all are always allowed
    reward: np.ndarray  # float32, sum of gamma^i r_{t+i} over the m rewards of the transition, m <= n
    discount: np.ndarray  # float32, gamma^m, or 0 if a termination ended the return
    bootstrap_offset: np.ndarray  # int32, m: bootstraps from the observation of row r + m; 0 if discount is 0
    step: np.ndarray  # int32, agent steps since the episode's start
    priority: np.ndarray  # float32, |TD error| computed by the actor, or 0: no transition begins here
    # and the counters, int64 [lanes]:
    written: np.ndarray
    committed: np.ndarray
    writable_until: np.ndarray

    def __init__(
        self, num_shards: int, num_envs: int, rows: int, obs_space: gymnasium.Space, action_space: gymnasium.Space,
        stack: int = 1,
    ):  # fmt: skip
        self.num_shards, self.num_envs, self.rows, self.stack = num_shards, num_envs, rows, stack
        self.num_lanes = num_shards * num_envs
        self.slots = Slots(_spec(num_shards, num_envs, rows, obs_space, action_space, stack), 1)
        self._attach()
        self.writable_until[:] = rows

    @staticmethod
    def bytes_needed(*sizes: Any) -> int:
        """Shared memory of `Shards` with these arguments (bytes)."""
        return layout(_spec(*sizes))[1]

    def lanes(self, shard: int) -> slice:
        return slice(shard * self.num_envs, (shard + 1) * self.num_envs)

    def arrays(self, shard: int) -> dict[str, np.ndarray]:
        """Rows [num_envs, rows, ...] and counters [num_envs] of one shard, by name, as views of shared memory."""
        return {name: getattr(self, name)[self.lanes(shard)] for name in self.slots.spec}

    def drop_incomplete(self, shard: int) -> None:
        """Drop the transitions that were incomplete when the last writer of a shard was killed."""
        arrays = self.arrays(shard)
        lane, row = spread(arrays["committed"], arrays["written"])
        arrays["priority"][lane, row % self.rows] = 0.0

    def fields(self) -> dict[str, Tensor]:
        """Rows of all shards, by name, as views of shared memory [lanes, rows, ...]."""
        return {name: field for name, field in self.slots[0].items() if name not in COUNTERS}

    def at(self, rows: np.ndarray) -> Self:
        """The same memory with counters of its own: `rows` [lanes] are filled and complete, later ones stay unseen."""
        view = copy.copy(self)
        view.written, view.committed = rows.copy(), rows.copy()
        view.writable_until = np.maximum(rows, self.rows)
        return view

    def gather(self, lane: np.ndarray, place: np.ndarray, out: Tensor) -> None:
        """Gather the observations at places [N] of their lanes, each stacked from its last frames."""
        # The oldest frame comes first; beyond either end it wraps.
        places = place[:, None] - np.arange(self.stack)[::-1]
        at = lane[:, None] * self.rows + places + self.rows * (places < 0) - self.rows * (places >= self.rows)
        frames = out.flatten(0, 1) if self.stack > 1 else out
        torch.index_select(self.frames, 0, torch.from_numpy(at.ravel()), out=frames)
        step = self.step.reshape(-1)[at[:, -1]]
        if len(starts := np.flatnonzero(step < self.stack - 1)):
            i, frame = np.nonzero(step[starts, None] < np.arange(self.stack)[::-1])
            out.numpy()[starts[i], frame] = 0  # in numpy: torch's indexing takes as long as the gathering

    def _attach(self) -> None:
        for name, field in self.slots[0].items():
            setattr(self, name, field.numpy())
        self.frames = self.slots[0]["frame"].flatten(0, 1)  # [lanes * rows, ...]

    def __getstate__(self) -> dict[str, Any]:
        attached = {*self.slots.spec, "frames"}
        return {name: value for name, value in self.__dict__.items() if name not in attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()


def _spec(
    num_shards: int, num_envs: int, rows: int, obs_space: gymnasium.Space, action_space: gymnasium.Space, stack: int = 1
) -> Spec:
    """Shapes and dtypes of the fields of all lanes."""
    assert isinstance(obs_space, Box), obs_space
    assert isinstance(action_space, Discrete | Box), action_space
    assert stack in (1, obs_space.shape[0]), obs_space
    ring = (num_shards * num_envs, rows)
    frame_shape = obs_space.shape[1:] if stack > 1 else obs_space.shape
    obs_dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
    action_dtype = torch.int64 if isinstance(action_space, Discrete) else torch.float32
    num_masked = int(action_space.n) if isinstance(action_space, MaskedDiscrete) else 0
    return {
        "frame": ((*ring, *frame_shape), obs_dtype),
        "action": ((*ring, *(action_space.shape or ())), action_dtype),
        "mask": ((*ring, num_masked), torch.bool),
        "reward": (ring, torch.float32),
        "discount": (ring, torch.float32),
        "bootstrap_offset": (ring, torch.int32),
        "step": (ring, torch.int32),
        "priority": (ring, torch.float32),
        **dict.fromkeys(COUNTERS, (ring[:1], torch.int64)),
    }


def spread(start: np.ndarray, stop: np.ndarray, first_lane: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, row) of every row from start[b] to stop[b] of lane `first_lane` + b, both [M]."""
    counts = np.maximum(stop - start, 0)
    lane = np.repeat(np.arange(first_lane, first_lane + len(counts)), counts)
    first = np.cumsum(counts) - counts  # place in the result where each lane begins
    return lane, np.arange(len(lane)) + np.repeat(start - first, counts)
