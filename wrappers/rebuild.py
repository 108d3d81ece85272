"""Games in progress that can be rebuilt bit for bit: environments seeded by a rule, and a log of actions to repeat.

An environment is a function of its seed and of the actions since. `GameLog` keeps, for each of N environments, how
often it was seeded and since when its actions count; `Rebuildable` seeds by that rule and repeats the actions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv, VectorWrapper

from wrappers.atari import atari_settings, is_atari

SEEDS = 2**31
"""number of seeds that environments take"""
ATARI_GAMES, STICKY_STEPS = 32, 4_000


class Seeding(NamedTuple):
    """When an environment is seeded again: at the end of a game, once so many games and steps have passed since.

    Rare seeding makes rebuilding long, frequent seeding costs time: on Atari each loads the ROM again, about 0.1 s.
    """

    games: int
    steps: int
    skip_games: bool  # a game does not depend on the actions before it: a reset stands in for each earlier game


def seeding_of(env_id: str) -> Seeding:
    """The rule for an environment: gymnasium's are seeded for each game, Atari's C++ ones after some games.

    With sticky actions a game depends on all random numbers drawn since the seed, so all actions are repeated.
    """
    if not is_atari(env_id):
        return Seeding(games=1, steps=0, skip_games=True)
    if atari_settings(env_id)["repeat_action_probability"]:
        return Seeding(games=1, steps=STICKY_STEPS, skip_games=False)
    return Seeding(games=ATARI_GAMES, steps=0, skip_games=True)


class GameLog:
    """Where N environments stand: how often each was seeded, games since, and the actions to repeat.

    Args:
        num_envs: N.
        seeding: the rule that `Rebuildable` seeds by.
        keep_actions: store actions, as the learner does; an actor only counts.
    """

    def __init__(self, num_envs: int, seeding: Seeding, keep_actions: bool = False):
        self.seeding, self.keep_actions = seeding, keep_actions
        self.now = 0  # steps of the vector environment so far
        self.seedings = np.zeros(num_envs, np.int64)  # [N], how often each was seeded again
        self.games = np.zeros(num_envs, np.int64)  # [N], games that have ended since
        self.seeded = np.zeros(num_envs, np.int64)  # [N], step of the last seeding
        self.start = np.zeros(num_envs, np.int64)  # [N], step from which on actions are repeated
        self.actions: list[np.ndarray] = []  # [T, N, ...] each, one after the other up to step `now`

    def step(self, done: np.ndarray) -> np.ndarray:
        """Count one step with its ends of games, bool [N]; returns which environments are seeded again, bool [N]."""
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
        """Take in actions [T, N, ...] and ends of games, bool [T, N]; forget the actions that no rebuilding needs."""
        assert actions.shape[:2] == done.shape, (actions.shape, done.shape)
        for ended in done:
            self.step(ended)
        self.actions.append(actions)
        kept = sum(map(len, self.actions))
        while self.actions and self.now - kept + len(self.actions[0]) <= self.start.min():
            kept -= len(self.actions.pop(0))

    def start_new_games(self) -> None:
        """Every environment is seeded again, whatever game it was in."""
        self._seed(np.ones(len(self.games), np.bool_))
        self.actions.clear()

    def state_dict(self) -> dict[str, Any]:
        """Arrays and the step; `actions` [S, N, ...] end at step `now`."""
        arrays = {name: getattr(self, name).copy() for name in ("seedings", "games", "seeded", "start")}
        kept = np.concatenate(self.actions) if self.actions else None
        return {"now": self.now, **arrays, "actions": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Raises ValueError for another number of environments."""
        for name in ("seedings", "games", "seeded", "start"):
            if state[name].shape != self.games.shape:
                raise ValueError(f"it is of {len(state[name])} environments, not {len(self.games)}")
            setattr(self, name, np.array(state[name]))
        self.now = int(state["now"])
        self.actions = [np.array(state["actions"])] if self.keep_actions and state["actions"] is not None else []


def game_seed(seed: int, env: int, seedings: int) -> int:
    """Seed of environment `env` after it was seeded `seedings` times; at first `seed + env`, as without rebuilding."""
    if seedings == 0:
        return (seed + env) % SEEDS
    return int(np.random.SeedSequence((seed, env, seedings)).generate_state(1)[0]) % SEEDS


def obs_hashes(obs: np.ndarray) -> np.ndarray:
    """A checksum of each observation [N, ...]: int64 [N]."""
    return np.array([zlib.crc32(row.tobytes()) for row in obs], np.int64)


class Rebuildable(VectorWrapper):
    """Seeds environments by a `Seeding` rule, and brings them back to where a `GameLog` says.

    Args:
        env: SAME_STEP autoreset, deterministic given seeds and actions.
        seed: environment i begins with `seed + i`.
        seeding: the rule.
    """

    def __init__(self, env: VectorEnv, seed: int, seeding: Seeding):
        super().__init__(env)
        self.seed, self.log = seed, GameLog(env.num_envs, seeding)

    def reset(self, *, seed=None, options=None):
        assert seed is None, "the rule gives the seeds"
        return self._reset(np.ones(self.num_envs, np.bool_), seeded=True)

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        again = self.log.step(terminated | truncated)
        if again.any():
            obs = self._reset(again, seeded=True)[0]
        return obs, rewards, terminated, truncated, infos

    def start_new_games(self) -> np.ndarray:
        """Leave all games and begin others; returns the observations [N, ...]."""
        self.log.start_new_games()
        return self._reset(np.ones(self.num_envs, np.bool_), seeded=True)[0]

    def rebuild(self, state: dict[str, Any], beat: Callable[[], None] = lambda: None) -> np.ndarray:
        """Repeat the games of a `GameLog.state_dict`; returns the observations [N, ...] that they have come to.

        All environments are stepped together and end together: one whose game is shorter takes idle steps until its
        own seeded reset, which wipes them out. `beat` is called at each step.
        """
        self.log.load_state_dict(state)
        log, actions = self.log, state["actions"]
        first = log.now - (0 if actions is None else len(actions))
        idle = self._idle_actions()
        obs, _ = self._reset(np.ones(self.num_envs, np.bool_), seeded=True)
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
                chosen = actions[now - first].astype(idle.dtype)
                waiting = (log.start > now).reshape(-1, *[1] * (idle.ndim - 1))
                obs = self.env.step(np.where(waiting, idle, chosen))[0]
        return obs

    def _idle_actions(self) -> np.ndarray:
        """Valid actions [N, ...] for steps that do not count."""
        space, shape = self.single_action_space, self.action_space.shape or ()
        if isinstance(space, Box):
            return np.broadcast_to(np.zeros(space.shape).clip(space.low, space.high).astype(space.dtype), shape).copy()
        assert isinstance(space, gymnasium.spaces.Discrete), space
        return np.full(shape, space.start, np.int64)

    def _reset(self, which: np.ndarray, *, seeded: bool) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset some environments, bool [N], with their next seeds or without."""
        counts = enumerate(self.log.seedings.tolist())
        seeds = [game_seed(self.seed, env, count) if seeded else None for env, count in counts]
        options = None if which.all() else {"reset_mask": which}
        own: Any = seeds  # SyncVectorEnv takes a seed for each environment, Atari's for each that is reset
        if isinstance(self.unwrapped, AtariVectorEnv):
            own = np.array([seed for seed, chosen in zip(seeds, which, strict=True) if chosen]) if seeded else None
        return self.env.reset(seed=own, options=options)
