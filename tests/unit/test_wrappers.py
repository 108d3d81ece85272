"""Both Atari paths are one environment; resets, ends, lives and actions follow the contract."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from wrappers import make_env, make_vec_env


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "BreakoutNoFrameskip-v4", "FreewayNoFrameskip-v4"])
def test_single_and_vector_atari_agree_frame_by_frame(env_id):
    """Without no-ops and stickiness nothing is random, so every byte must be equal, over ends of games too."""
    single = make_env(env_id, noop_max=0)
    vector = make_vec_env(env_id, 2, seed=3, noop_max=0)
    rng = np.random.default_rng(0)
    single_obs, single_info = single.reset(seed=3)
    vector_obs, vector_infos = vector.reset()
    assert single_obs.shape == (4, 84, 84)
    assert single_obs.dtype == vector_obs.dtype == np.uint8
    games = lost_lives = 0
    for _ in range(1200):
        np.testing.assert_array_equal(single_obs, vector_obs[0])
        action = int(rng.integers(single.action_space.n))
        single_obs, reward, terminated, truncated, single_info = single.step(action)
        vector_obs, rewards, ends, cuts, vector_infos = vector.step(np.array([action, 0]))
        assert (reward, terminated, truncated) == (rewards[0], ends[0], cuts[0])
        assert single_info["life_lost"] == vector_infos["life_lost"][0]
        lost_lives += single_info["life_lost"]
        if terminated or truncated:
            np.testing.assert_array_equal(single_obs, vector_infos["final_obs"][0])
            games += 1
            single_obs, _ = single.reset()
    single.close(), vector.close()
    assert games >= 1 or env_id.startswith("Freeway")
    assert lost_lives >= 4 or not env_id.startswith("Breakout")


def test_sticky_actions_follow_the_spec():
    def stickiness(env_id):
        env = make_env(env_id)
        return env.unwrapped.ale.getFloat("repeat_action_probability")

    assert stickiness("PongNoFrameskip-v4") == 0.0
    assert stickiness("ALE/Pong-v5") == 0.25


def test_atari_rewards_are_raw():
    """The pills of Ms. Pac-Man count ten points each."""
    env = make_vec_env("ALE/MsPacman-v5", 4, seed=0)
    env.reset()
    rng = np.random.default_rng(0)
    rewards = [env.step(rng.integers(0, env.single_action_space.n, 4))[1] for _ in range(100)]
    assert np.max(rewards) >= 10


def test_vector_env_is_seeded():
    def play(seed):
        env = make_vec_env("PongNoFrameskip-v4", 2, seed=seed)
        frames = [env.reset()[0]]
        frames += [env.step(np.array([2, 3]))[0] for _ in range(30)]
        return np.stack(frames)

    np.testing.assert_array_equal(play(5), play(5))
    assert (play(5) != play(50)).any()


def test_truncated_games_bring_their_final_observation():
    env = make_vec_env("PongNoFrameskip-v4", 2, seed=0, max_frames=40)
    env.reset()
    for _ in range(9):
        obs, _, terminated, truncated, infos = env.step(np.array([0, 0]))
        assert not (terminated | truncated).any()
    last_frames = obs[:, 3]
    obs, _, terminated, truncated, infos = env.step(np.array([0, 0]))
    assert truncated.all()
    assert not terminated.any()
    np.testing.assert_array_equal(infos["final_obs"][:, 2], last_frames)
    assert not obs[:, :3].any(), "a new game starts with an empty stack"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_classic_control_resets_in_the_step_that_ends_an_episode(env_id):
    env = make_vec_env(env_id, 3, seed=0)
    obs, _ = env.reset()
    assert obs.dtype == np.float32
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for _ in range(250):
        previous = obs
        obs, _, terminated, truncated, infos = env.step(np.stack([env.single_action_space.sample()] * 3))
        done = terminated | truncated
        if done.any():
            final = infos["final_obs"][done]
            assert final.dtype == np.float32
            assert np.abs(final - previous[done]).max() < 2.5, "the final observation follows the one before it"
            assert (obs[done] != final).any(), "the returned observation is the next episode's"
            return
    pytest.fail("no episode ended")


class OneArray(gymnasium.Env):
    """Episodes of two steps; every observation is written into the same array."""

    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = getattr(self, "obs", np.zeros(2, np.float32))
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, False, bool(self.obs[0] == 2), {}


def test_a_reset_does_not_overwrite_the_final_observation(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    gymnasium.register("OneArray-v0", entry_point=OneArray)
    env = make_vec_env("OneArray-v0", 3, seed=0)
    np.testing.assert_array_equal(env.reset()[0], 0)
    np.testing.assert_array_equal(env.step(np.zeros(3, np.int64))[0], 1)
    obs, _, _, truncated, infos = env.step(np.zeros(3, np.int64))
    assert truncated.all()
    np.testing.assert_array_equal(infos["final_obs"], 2)
    np.testing.assert_array_equal(obs, 0)


@pytest.mark.parametrize("bad", [np.array([6, 0]), np.array([-1, 0]), np.array([0]), np.zeros((2, 1), np.int64)])
def test_actions_outside_the_space_are_refused(bad):
    env = make_vec_env("PongNoFrameskip-v4", 2, seed=0)
    env.reset()
    with pytest.raises(ValueError, match="actions"):
        env.step(bad)


def test_box_actions_are_checked():
    env = make_vec_env("Pendulum-v1", 2, seed=0)
    env.reset()
    env.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="outside"):
        env.step(np.full((2, 1), np.nan, np.float32))


def test_unknown_and_unsupported_ids_say_what_to_do():
    with pytest.raises(gymnasium.error.Error, match="Did you mean"):
        make_env("PongNoFrameskp-v4")
    with pytest.raises(ValueError, match="NoFrameskip"):
        make_env("Pong-v4")
    with pytest.raises(ValueError, match="Box"):
        make_env("FrozenLake-v1")
    with pytest.raises(ValueError, match="num_envs"):
        make_vec_env("CartPole-v1", 0)


def test_custom_ids_import_their_module(tmp_path, monkeypatch):
    (tmp_path / "my_game.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('MyPole-v0', entry_point=CartPoleEnv, max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = make_vec_env("my_game:MyPole-v0", 2, seed=0)
    env.reset()
    for _ in range(7):
        *_, truncated, _ = env.step(np.array([0, 1]))
    assert truncated.all()


def test_ram_observations_are_vectors():
    gymnasium.register("RamPong-v0", entry_point="ale_py.env:AtariEnv", kwargs={"game": "pong", "obs_type": "ram"})
    obs, _ = make_vec_env("RamPong-v0", 2, seed=0).reset()
    assert obs.shape == (2, 128)
    assert obs.dtype == np.float32


def test_what_an_environment_raises_says_where(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "process")
    env = make_vec_env("counting_env:Crash-v0", 2, seed=7)
    env.reset()
    for _ in range(49):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(ArithmeticError) as caught:
        env.step(np.zeros(2, np.int64))
    assert caught.value.__notes__ == ["(raised by step() of counting_env:Crash-v0, seed 7, after 49 steps)"]
    with pytest.raises(ArithmeticError) as caught:
        make_vec_env("counting_env:Broken-v0", 2, seed=7).reset()
    assert caught.value.__notes__ == ["(raised by reset() of counting_env:Broken-v0, seed 7, after 0 steps)"]
