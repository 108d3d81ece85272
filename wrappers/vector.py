"""`make_vec_env`, which actors step, and `make_env`, the same as a single environment, for checks and video.

Atari games run on ALE's C++ vector environment, all others on gymnasium's `SyncVectorEnv`. Both autoreset in the step
that ends an episode (`SAME_STEP`): the observation is the next episode's first, `infos["final_obs"]` has the last one.
"""

import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from a3c_mp.wrappers.actions import GuardedEnvs, env_seed, with_plain_actions
from a3c_mp.wrappers.atari import is_atari, make_atari_env, make_atari_vec_env
from a3c_mp.wrappers.contract import UNWATCHED, CheckedEnv
from a3c_mp.wrappers.identity import OUTSIDE, assume_identity
from a3c_mp.wrappers.ids import extras_of, make_registered, wrapped
from a3c_mp.wrappers.observations import as_array
from a3c_mp.wrappers.rebuild import Rebuildable, seeding_of

LOG = logging.getLogger(__name__)
NOT_MADE: dict[str, str] = {}  # environment id -> why its `spaces`, which choose settings, could not be found


def make_vec_env(
    env_id: str, num_envs: int, *, seed: int, rebuildable: bool = False, fields: Collection[str] = (),
    heartbeats: Any = UNWATCHED, actor: int = OUTSIDE,
) -> GuardedEnvs:  # fmt: skip
    """Vector of `num_envs` (N) environments with one of `ACTIONS`, in `SAME_STEP` autoreset mode.

    Observations are as in `make_env`, stacked [N, ...]; rewards [N] are **raw**. `infos["final_obs"]` [N, ...] is there
    if an environment is done, and valid in the rows of those that are. Atari has `infos["life_lost"]`, bool [N]. Seeds,
    of 31 bits, and masks are as in `GuardedEnvs`; a `Rebuildable` also derives the seeds of later games from `seed`.
    Of what else an environment's info says in a step, `infos` has the names in `fields`: N values as they are, None
    where one lacks it; no such name if all do. Environments other than Atari's are made and stepped one after another,
    each with its own heartbeat and, with the number `actor`, its own numbers (`assume_identity`). Raises as `make_env`.
    """
    assume_identity(actor)
    if is_atari(env_id):
        heartbeats.starting()
        env = make_atari_vec_env(env_id, num_envs)
    else:
        env = SameStepEnvs(env_id, [env_seed(seed, i) for i in range(num_envs)], fields, heartbeats, actor)
    beat = heartbeats.beat
    return Rebuildable(env, seed, beat, seeding_of(env_id)) if rebuildable else GuardedEnvs(env, seed, beat)


def make_env(env_id: str, *, render_mode: str | None = None) -> gymnasium.Env:
    """One environment with the same observations and raw rewards as `make_vec_env`; for ids see `wrappers.ids`.

    Observations of Atari are uint8 [4, 84, 84], other images uint8 [C, H, W], anything else float32, structures one
    vector (`ImageAndVector` where there are images in them). Actions are as in `PlainActions`. Raises gymnasium's
    errors for unknown ids, UnsupportedEnv for what `wrapped`, `as_array` or `atari_settings` refuses.
    """
    render: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}  # not every one takes it
    if is_atari(env_id):
        return make_atari_env(env_id, **render)
    extras = extras_of(env_id)
    env = make_registered(env_id, **render)
    try:
        env = wrapped(env, extras.wrapper)
        return as_array(with_plain_actions(env), env_id, extras)
    except BaseException:
        close(env)  # a simulator may hold a port
        raise


def spaces(env_id: str) -> tuple[gymnasium.Space, gymnasium.Space]:
    """(Observation space, action space) of an environment, which is made for it and closed."""
    before = assume_identity(OUTSIDE)
    try:
        close(env := make_env(env_id))
        return env.observation_space, env.action_space
    except BaseException as error:
        NOT_MADE[env_id] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise
    finally:
        assume_identity(*before)


def close(env: gymnasium.Env) -> None:
    """Close an environment; an error in that, as of a window that was never opened, has no consequences."""
    with suppress(Exception):
        env.close()


class SameStepEnvs(SyncVectorEnv):
    """Gymnasium's environments, stepped one after another, each in a `CheckedEnv`.

    `infos["final_obs"]` is one array, as in `AtariVectorEnv`. The first NaN or infinity in rewards and observations is
    logged, with the environment's seed and step; it is not learned from.
    """

    def __init__(self, env_id: str, seeds: list[int], fields: Collection[str], heartbeats: Any, actor: int):
        self.fields, self.warned, self.envs = fields, False, []

        def make(number: int) -> gymnasium.Env:
            assume = partial(assume_identity, actor, number)
            heartbeats.starting()
            assume()
            try:
                env = CheckedEnv(make_env(env_id), env_id, seeds[number], fields, heartbeats.beat, assume)
            except Exception as error:
                error.add_note(f"(raised by the constructor of {env_id}, seed {seeds[number]})")
                raise
            self.envs.append(env)
            return env

        try:
            makers = [partial(make, number) for number in range(len(seeds))]
            super().__init__(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        except BaseException:  # those that exist may hold a port
            self.close_extras()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            close(env)

    def reset(self, **kwargs: Any):
        obs, infos = super().reset(**kwargs)
        self._warn_not_finite("the observation", obs)
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        for name in self.fields:
            values = [env.get_wrapper_attr("fields")[name] for env in self.envs]
            if any(value is not None for value in values):
                infos[name] = values
        rewards[np.abs(rewards) > np.finfo(np.float32).max] *= np.inf  # learning has them in float32
        self._warn_not_finite("the reward", rewards)
        if "final_obs" in infos:
            final_obs, done = np.zeros_like(obs), terminated | truncated
            final_obs[done] = np.stack(infos["final_obs"][done])
            infos["final_obs"] = final_obs
            self._warn_not_finite("the last observation", final_obs)
        self._warn_not_finite("the observation", obs)
        return obs, rewards, terminated, truncated, infos

    def _warn_not_finite(self, name: str, values: np.ndarray) -> None:
        """Check values [N, ...] of all environments at once, which takes two microseconds."""
        if self.warned or values.dtype.kind != "f" or np.isfinite(values).all():
            return
        self.warned = True
        env, *index = np.argwhere(~np.isfinite(values))[0].tolist()
        place = self.envs[env].get_wrapper_attr("place")()
        LOG.warning(f"{name}{index or ''} is {values[env, *index]} in {place}; further ones are not shown")
