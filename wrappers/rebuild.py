"""Rebuild games in progress bit for bit: seed environments by a rule and repeat the logged actions.

An environment's state is a function of its seed and the actions since. `GameLog` records, for each of N environments,
how often it was seeded and from which step on its actions count; `Rebuildable` seeds by the rule and repeats them.
"""

import zlib
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv

from a3c_mp.wrappers.actions import GuardedEnvs, allowed_action
from a3c_mp.wrappers.atari import atari_settings, is_atari

ATARI_GAMES, STICKY_STEPS = 32, 4_000  # games, with sticky actions steps, until ALE is seeded again
COUNTERS = "seedings", "games", "seeded", "start"  # arrays of a `GameLog`


class Seeding(NamedTuple):
    """Rule for seeding an environment again: at the end of a game, after at least this many games and steps."""

    games: int
    steps: int
    skip_games: bool  # games do not depend on earlier actions: a plain reset replaces each earlier game


def seeding_of(env_id: str) -> Seeding:
    """The `Seeding` of an environment: gymnasium's are seeded for each game, Atari's C++ ones after some games.

    Each seeding loads the ROM again (0.1 s); rare ones make rebuilding slow. With sticky actions a game depends on all
    random numbers drawn since the seed, so all actions are repeated.
    """
    if not is_atari(env_id):
        return Seeding(games=1, steps=0, skip_games=True)
    if atari_settings(env_id)["repeat_action_probability"]:
        return Seeding(games=1, steps=STICKY_STEPS, skip_games=False)
    return Seeding(games=ATARI_GAMES, steps=0, skip_games=True)


class GameLog:
    """What rebuilds the games of N environments: actors only count (`step`), the learner keeps actions (`extend`)."""

    def __init__(self, num_envs: int, seeding: Seeding):
        self.seeding = seeding
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
        for ended in done:
            self.step(ended)
        self.actions.append(actions)
        kept = sum(map(len, self.actions))
        while self.actions and self.now - kept + len(self.actions[0]) <= self.start.min():
            kept -= len(self.actions.pop(0))

    def start_new_games(self) -> None:
        """Abandon the games in progress: every environment is seeded again."""
        self._seed(np.ones(len(self.games), np.bool_))
        self.actions.clear()

    def state_dict(self) -> dict[str, np.ndarray]:
        """`now`, counters [N], and if there are any `actions` [S, N, ...] up to step `now`."""
        kept = {"actions": np.concatenate(self.actions)} if self.actions else {}
        return {"now": np.array(self.now), **{name: getattr(self, name).copy() for name in COUNTERS}, **kept}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state_dict`. Raises ValueError for another number of environments."""
        if state["games"].shape != self.games.shape:
            raise ValueError(f"it has {len(state['games'])} environments, not {len(self.games)}")
        for name in COUNTERS:
            setattr(self, name, state[name].copy())
        self.now = int(state["now"])
        self.actions = [state["actions"].copy()] if "actions" in state else []


def obs_hashes(obs: np.ndarray) -> np.ndarray:
    """CRC-32 of observations [N, ...]: int64 [N]."""
    return np.array([zlib.crc32(row.tobytes()) for row in obs], np.int64)


class Rebuildable(GuardedEnvs):
    """Vector environment that seeds by a rule and can rebuild the games of a `GameLog`.

    It must be deterministic, given seeds and actions. Environment i starts with `seed + i`.
    """

    def __init__(self, env: VectorEnv, seed: int, beat: Callable[[], object], seeding: Seeding):
        super().__init__(env, seed, beat)
        self.log = GameLog(env.num_envs, seeding)

    def reset(self, *, seed=None, options=None):
        return self.reset_some(np.ones(self.num_envs, np.bool_), self.log.seedings)

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        again = self.log.step(terminated | truncated)
        if again.any():
            obs = self.reset_some(again, self.log.seedings)[0]
        return obs, rewards, terminated, truncated, infos

    def start_new_games(self) -> np.ndarray:
        """Abandon all games and start new ones; returns the observations [N, ...]."""
        self.log.start_new_games()
        return self.reset()[0]

    def rebuild(self, log: GameLog) -> np.ndarray:
        """Rebuild the games of a log, to be continued here; returns the current observations [N, ...].

        All environments step together up to the same step: one with fewer steps to repeat takes idle actions until its
        seeded reset, which undoes them.
        """
        actions = np.concatenate(log.actions or [np.empty(0)])
        self.log = log = deepcopy(log)  # arrays that came through Ray are read-only
        log.actions.clear()
        first = log.now - len(actions)
        obs, _ = self.reset()
        first_start = int(log.start.min())
        for now in range(first_start, log.now + 1):
            begins = log.start == now
            if begins.any():
                if now > first_start:
                    obs = self.reset_some(begins, log.seedings)[0]
                for game in range(log.games[begins].max() if log.seeding.skip_games else 0):
                    obs, _ = self.reset_some(begins & (log.games > game))
            if now < log.now:
                idle = self._idle_actions()
                chosen = actions[now - first].astype(idle.dtype)
                waiting = (log.start > now).reshape(-1, *[1] * (idle.ndim - 1))
                obs = super().step(np.where(waiting, idle, chosen))[0]
        return obs

    def _idle_actions(self) -> np.ndarray:
        """Valid actions [N, ...] for steps whose results are discarded."""
        if self.mask is not None:
            return np.stack([allowed_action(self.space, mask, min) for mask in self.mask])
        idle = np.zeros(()).clip(self.low, self.high) if isinstance(self.space, Box) else self.low
        return np.broadcast_to(idle, self.shape).astype(self.space.dtype)
