"""Environments rebuilt from seeds and actions are the same to the last bit, and stay the same."""

import copy

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from a3c_mp.wrappers import GameLog, make_vec_env, rebuild, seeding_of

KINDS = {
    "CartPole-v1": 300,
    "Pendulum-v1": 450,
    "BreakoutNoFrameskip-v4": 600,
    "ALE/Breakout-v5": 510,  # sticky actions
    "envs:Masked-v0": 300,
}
"""environment -> steps, enough for some of its games to be seeded again"""
N = 3


@pytest.fixture(autouse=True)
def frequent_seeds(monkeypatch):
    monkeypatch.setattr(rebuild, "ATARI_GAMES", 2)
    monkeypatch.setattr(rebuild, "STICKY_STEPS", 120)


def rebuildable(env_id):
    return make_vec_env(env_id, N, seed=5, rebuildable=True)


def actions_of(env, rng):
    space = env.single_action_space
    if (mask := env.mask) is not None:
        return np.array([rng.choice(np.flatnonzero(allowed)) for allowed in mask])
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=N)
    return rng.uniform(space.low, space.high, (N, *space.shape)).astype(space.dtype)


def played(env_id, steps):
    """An environment after so many steps with random actions, its log, and its observations."""
    env, log, rng = rebuildable(env_id), GameLog(N, seeding_of(env_id)), np.random.default_rng(1)
    obs, _ = env.reset()
    for _ in range(steps // 30):  # the learner gets them in chunks
        chunk = []
        for _ in range(30):
            actions = actions_of(env, rng)
            obs, _, terminated, truncated, _ = env.step(actions)
            chunk.append((actions, terminated | truncated))
        log.extend(*map(np.array, zip(*chunk, strict=True)))
    return env, log, obs


@pytest.mark.parametrize(("env_id", "steps"), KINDS.items())
def test_a_rebuilt_environment_is_the_same_and_stays_the_same(env_id, steps):
    env, log, obs = played(env_id, steps)
    assert (log.seedings > 0).all(), "some games of each were seeded again"
    again = rebuildable(env_id)
    assert (again.rebuild(copy.deepcopy(log)) == obs).all()
    rng, ends = np.random.default_rng(1), 0
    for _ in range(steps // 3):
        actions = actions_of(env, rng)
        one, other = env.step(actions), again.step(actions)
        for mine, its in zip(one[:4], other[:4], strict=True):
            assert (mine == its).all()
        if (done := one[2] | one[3]).any():
            assert (one[4]["final_obs"][done] == other[4]["final_obs"][done]).all()
            ends += 1
    assert ends
    for name in ("seedings", "games", "seeded", "start"):
        assert (getattr(env.log, name) == getattr(again.log, name)).all()


def test_only_the_actions_that_are_needed_are_kept():
    log = played("CartPole-v1", 300)[1]
    assert len(log.state_dict()["actions"]) < 300 - log.start.min() + 30


def test_an_environment_that_has_taken_no_step_is_rebuilt_by_a_reset():
    env = rebuildable("CartPole-v1")
    obs, _ = env.reset()
    again = rebuildable("CartPole-v1")
    assert (again.rebuild(GameLog(N, seeding_of("CartPole-v1"))) == obs).all()
    assert (again.start_new_games() != obs).any(), "other games have other seeds"


def test_a_log_of_another_number_of_environments_is_refused():
    with pytest.raises(ValueError, match="it has 3 environments, not 4"):
        GameLog(4, seeding_of("CartPole-v1")).load_state_dict(GameLog(3, seeding_of("CartPole-v1")).state_dict())
