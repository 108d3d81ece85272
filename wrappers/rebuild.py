"""Rebuild games in progress bit for bit: seed environments by a rule and repeat the logged actions.

An environment's state is a function of its seed and the actions since. `GameLog` records, for each of N environments,
how often it was seeded and from which step on its actions count; `Rebuildable` seeds by the rule and repeats them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv, VectorWrapper

from wrappers.actions import action_mask, allowed_action
from wrappers.atari import atari_settings, is_atari
from wrappers.seeds import env_seed, reset_envs

ATARI_GAMES, STICKY_STEPS = 32, 4_000
"""games, and with sticky actions steps, until an Atari environment is seeded again"""


class Seeding(NamedTuple):
    """Rule for seeding an environment again: at the end of a game, after at least so many games and steps.

    Rare seeding makes rebuilding slow; frequent seeding costs time: on Atari each loads the ROM again, about 0.1 s.
    """

    games: int
    steps: int
    skip_games: bool  # games do not depend on earlier actions: a plain reset replaces each earlier game


def seeding_of(env_id: str) -> Seeding:
    """The `Seeding` of an environment: gymnasium's are seeded for each game, Atari's C++ ones after some games.

    With sticky actions a game depends on all random numbers drawn since the seed, so all actions are repeated.
    """
    if not is_atari(env_id):
        return Seeding(games=1, steps=0, skip_games=True)
    if atari_settings(env_id)["repeat_action_probability"]:
        return Seeding(games=1, steps=STICKY_STEPS, skip_games=False)
    return Seeding(games=ATARI_GAMES, steps=0, skip_games=True)


class GameLog:
    """State of N environments for rebuilding: how often each was seeded, games since, and the actions to repeat.

    Args:
        num_envs: N.
        seeding: the rule of `Rebuildable`.
        keep_actions: store actions, as the learner does; an actor only counts.
    """

    def __init__(self, num_envs: int, seeding: Seeding, keep_actions: bool = False):
        self.seeding, self.keep_actions = seeding, keep_actions
        self.now = 0  # steps of the vector environment so far
        self.seedings = np.zeros(num_envs, np.int64)  # [N], how often each was seeded again
        self.games = np.zeros(num_envs, np.int64)  # [N], games since then
        self.seeded = np.zeros(num_envs, np.int64)  # [N], step of the last seeding
        self.start = np.zeros(num_envs, np.int64)  # [N], first step whose actions are repeated
        self.actions: list[np.ndarray] = []  # chunks [T, N, ...], in order; the last one ends at step `now`

    def step(self, done: np.ndarray) -> np.ndarray:
        """Count one step, with bool [N] `done`; returns which environments must be seeded again, bool [N]."""
        self.now += 1
        if not done.any():
            return done
        self.games += done
        again = done & (self.games >= self.seeding.games) & (self.now - self.seeded >= self.seeding.steps)
        self._seed(again)
        if self.seeding.skip_games:
            self.start[done] = self.now
        return again

    def _seed(self, which: np.ndarray) -> None:
        self.seedings += which
        self.games[which], self.seeded[which], self.start[which] = 0, self.now, self.now

    def extend(self, actions: np.ndarray, done: np.ndarray) -> None:
        """Add actions [T, N, ...] and `done` [T, N]; drop actions that rebuilding no longer needs."""
        assert actions.shape[:2] == done.shape, (actions.shape, done.shape)
        for ended in done:
            self.step(ended)
        self.actions.append(actions)
        kept = sum(map(len, self.actions))
        while self.actions and self.now - kept + len(self.actions[0]) <= self.start.min():
            kept -= len(self.actions.pop(0))

    def start_new_games(self) -> None:
        """Count a new seeding of every environment; games in progress are abandoned."""
        self._seed(np.ones(len(self.games), np.bool_))
        self.actions.clear()

    def state_dict(self) -> dict[str, Any]:
        """Counters [N], and `actions` [S, N, ...] up to step `now`."""
        arrays = {name: getattr(self, name).copy() for name in ("seedings", "games", "seeded", "start")}
        kept = np.concatenate(self.actions) if self.actions else None
        return {"now": self.now, **arrays, "actions": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError for another number of environments."""
        for name in ("seedings", "games", "seeded", "start"):
            if state[name].shape != self.games.shape:
                raise ValueError(f"it has {len(state[name])} environments, not {len(self.games)}")
            setattr(self, name, np.array(state[name]))
        self.now = int(state["now"])
        self.actions = [np.array(state["actions"])] if self.keep_actions and state["actions"] is not None else []


def obs_hashes(obs: np.ndarray) -> np.ndarray:
    """CRC-32 of each observation [N, ...]: int64 [N]."""
    return np.array([zlib.crc32(row.tobytes()) for row in obs], np.int64)


class Rebuildable(VectorWrapper):
    """Vector environment that seeds by a `Seeding` rule and can rebuild the games of a `GameLog`.

    Args:
        env: SAME_STEP autoreset, deterministic given seeds and actions.
        seed: environment i starts with `seed + i`.
        seeding: the rule.
    """

    def __init__(self, env: VectorEnv, seed: int, seeding: Seeding):
        super().__init__(env)
        self.seed, self.log = seed, GameLog(env.num_envs, seeding)

    def reset(self, *, seed=None, options=None):
        assert seed is None, "seeds come from the rule"
        return self._reset(np.ones(self.num_envs, np.bool_), seeded=True)

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        again = self.log.step(terminated | truncated)
        if again.any():
            obs = self._reset(again, seeded=True)[0]
        return obs, rewards, terminated, truncated, infos

    def start_new_games(self) -> np.ndarray:
        """Abandon all games and start new ones; returns the observations [N, ...]."""
        self.log.start_new_games()
        return self._reset(np.ones(self.num_envs, np.bool_), seeded=True)[0]

    def rebuild(self, state: dict[str, Any], beat: Callable[[], None] = lambda: None) -> np.ndarray:
        """Rebuild the games of a `GameLog.state_dict`; returns the current observations [N, ...].

        All environments step together up to the same step: one with fewer steps to repeat takes idle actions until its
        seeded reset, which undoes them. `beat` is called at each step.
        """
        self.log.load_state_dict(state)
        log, actions = self.log, state["actions"]
        first = log.now - (0 if actions is None else len(actions))
        obs, _ = self._reset(np.ones(self.num_envs, np.bool_), seeded=True)
        idle = self._idle_actions()
        first_start = int(log.start.min())
        for now in range(first_start, log.now + 1):
            beat()
            begins = log.start == now
            if begins.any():
                obs = self._reset(begins, seeded=True)[0] if now > first_start else obs
                for game in range(log.games[begins].max() if log.seeding.skip_games else 0):
                    beat()
                    obs, _ = self._reset(begins & (log.games > game), seeded=False)
            if now < log.now:
                idle = idle if action_mask(self) is None else self._idle_actions()
                chosen = actions[now - first].astype(idle.dtype)
                waiting = (log.start > now).reshape(-1, *[1] * (idle.ndim - 1))
                obs = self.env.step(np.where(waiting, idle, chosen))[0]
        return obs

    def _idle_actions(self) -> np.ndarray:
        """Valid actions [N, ...] for steps whose result is discarded."""
        space, shape = self.single_action_space, self.action_space.shape or ()
        if isinstance(space, Box):
            return np.broadcast_to(np.zeros(space.shape).clip(space.low, space.high).astype(space.dtype), shape).copy()
        if (masks := action_mask(self)) is not None:
            return np.stack([allowed_action(space, mask) for mask in masks])
        return np.full(shape, getattr(space, "start", 0), space.dtype)

    def _reset(self, which: np.ndarray, *, seeded: bool) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset the environments in `which`, bool [N], with their next seeds or without."""
        counts = enumerate(self.log.seedings.tolist())
        seeds = [env_seed(self.seed, env, count) for env, count in counts] if seeded else None
        return reset_envs(self.env, which, seeds)
