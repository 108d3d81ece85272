"""Both Atari paths are one environment; resets, ends, lives and actions follow the contract."""

import re

import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from wrappers import BrokenContract, atari, make_env, make_vec_env


@pytest.mark.parametrize(
    ("env_id", "steps"), [("PongNoFrameskip-v4", 1200), ("BreakoutNoFrameskip-v4", 500), ("FreewayNoFrameskip-v4", 300)]
)
def test_single_and_vector_atari_agree_frame_by_frame(env_id, steps, monkeypatch):
    """Without no-ops and stickiness nothing is random, so every byte must be equal, over ends of games too."""
    monkeypatch.setattr(atari, "NOOP_MAX", 0)
    single, vector = make_env(env_id), make_vec_env(env_id, 2, seed=3)
    rng = np.random.default_rng(0)
    (single_obs, info), (vector_obs, _) = single.reset(seed=3), vector.reset()
    assert single_obs.shape == (4, 84, 84)
    assert single_obs.dtype == vector_obs.dtype == np.uint8
    games, lost_lives, lives = 0, 0, info["lives"]
    for _ in range(steps):
        np.testing.assert_array_equal(single_obs, vector_obs[0])
        action = int(rng.integers(single.action_space.n))
        single_obs, reward, terminated, truncated, info = single.step(action)
        vector_obs, rewards, ends, cuts, infos = vector.step(np.array([action, 0]))
        assert (reward, terminated, truncated) == (rewards[0], ends[0], cuts[0])
        assert infos["life_lost"][0] == (info["lives"] < lives and not terminated)
        lost_lives += infos["life_lost"][0]
        if terminated or truncated:
            np.testing.assert_array_equal(single_obs, infos["final_obs"][0])
            games += 1
            single_obs, info = single.reset()
        lives = info["lives"]
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


def test_truncated_games_bring_their_final_observation(monkeypatch):
    short = {"max_num_frames_per_episode": 40}
    monkeypatch.setattr(atari, "AtariVectorEnv", lambda **settings: AtariVectorEnv(**{**settings, **short}))
    env = make_vec_env("PongNoFrameskip-v4", 2, seed=0)
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


def test_a_reset_does_not_overwrite_the_final_observation(register):
    register("OneArray-v0", entry_point=OneArray)
    env = make_vec_env("OneArray-v0", 3, seed=0)
    np.testing.assert_array_equal(env.reset()[0], 0)
    np.testing.assert_array_equal(env.step(np.zeros(3, np.int64))[0], 1)
    obs, _, _, truncated, infos = env.step(np.zeros(3, np.int64))
    assert truncated.all()
    np.testing.assert_array_equal(infos["final_obs"], 2)
    np.testing.assert_array_equal(obs, 0)


PONG, PENDULUM = "PongNoFrameskip-v4", "Pendulum-v1"
BAD_ACTIONS = [(PONG, [6, 0]), (PONG, [-1, 0]), (PONG, [0]), (PONG, [[0], [0]]), (PENDULUM, [[np.nan], [0.0]])]


@pytest.mark.parametrize(("env_id", "bad"), BAD_ACTIONS)
def test_actions_outside_the_space_are_refused(env_id, bad):
    env = make_vec_env(env_id, 2, seed=0)
    env.reset()
    with pytest.raises(ValueError, match="actions"):
        env.step(np.array(bad))


def test_unknown_and_unsupported_ids_say_what_to_do():
    with pytest.raises(gymnasium.error.Error, match="Did you mean"):
        make_env("PongNoFrameskp-v4")
    with pytest.raises(ValueError, match="NoFrameskip"):
        make_env("Pong-v4")


class Picture(gymnasium.Env):
    """Every pixel says which row, column and channel it is of."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape):
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.arange(np.prod(self.observation_space.shape)).astype(np.uint8).reshape(
            self.observation_space.shape
        ), {}


@pytest.mark.parametrize(
    ("shape", "channels_first"),
    [((3, 84, 84), (3, 84, 84)), ((84, 84, 3), (3, 84, 84)), ((1, 48, 64), (1, 48, 64)), ((7, 7, 3), (3, 7, 7))],
)
def test_the_channels_of_an_image_are_its_smaller_outer_axis_and_come_first(register, shape, channels_first):
    register("Picture-v0", entry_point=Picture, shape=shape)
    env = make_env("Picture-v0")
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape == channels_first
    assert make_vec_env("Picture-v0", 2, seed=0).single_observation_space == env.observation_space
    raw, _ = env.unwrapped.reset()
    np.testing.assert_array_equal(obs, raw if shape == channels_first else raw.transpose(2, 0, 1))


def test_images_whose_channels_cannot_be_told_are_refused_and_small_ones_stay_as_they_are(register):
    register("Picture-v0", entry_point=Picture, shape=(84, 84, 84))
    with pytest.raises(ValueError, match=r"\(84, 84, 84\).* channels first or last"):
        make_env("Picture-v0")
    register("Board-v0", entry_point=Picture, shape=(8, 8, 8))
    assert make_env("Board-v0").reset()[0].shape == (8, 8, 8)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("continuous", True), ("frameskip", 3), ("max_num_frames_per_episode", 400), ("mode", 1), ("difficulty", 1)],
)
def test_an_atari_id_that_asks_for_what_the_vector_environment_lacks_is_refused(register, setting, value):
    register("MyPong-v0", entry_point="ale_py.env:AtariEnv", game="pong")
    assert make_env("MyPong-v0").observation_space == make_vec_env("MyPong-v0", 1, seed=0).single_observation_space
    register("OddPong-v0", entry_point="ale_py.env:AtariEnv", game="pong", **{setting: value})
    for make in (make_env, lambda env_id: make_vec_env(env_id, 2, seed=0)):
        with pytest.raises(ValueError, match=f"{setting}={value}"):
            make("OddPong-v0")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_seeds_go_round_at_31_bits(env_id):
    def frames(seed, num_envs):
        env = make_vec_env(env_id, num_envs, seed=seed)
        first = [env.reset()[0]]
        return np.stack(first + [env.step(np.array([1] * num_envs))[0] for _ in range(20)])

    largest = 2**31 - 1
    high = frames(largest, 3)
    np.testing.assert_array_equal(high[:, 1:], frames(0, 2))
    np.testing.assert_array_equal(high[:, :1], frames(largest, 1))
    assert (high[:, 0] != high[:, 1]).any()


def test_ram_observations_are_vectors(register):
    register("RamPong-v0", entry_point="ale_py.env:AtariEnv", game="pong", obs_type="ram")
    obs, _ = make_vec_env("RamPong-v0", 2, seed=0).reset()
    assert obs.shape == (2, 128)
    assert obs.dtype == np.float32


def test_what_an_environment_raises_says_where():
    env = make_vec_env("envs:Crash-v0", 2, seed=7)
    env.reset()
    with pytest.raises(ArithmeticError) as caught:
        play(env, 50)
    assert caught.value.__notes__ == ["(raised by step() of envs:Crash-v0, seed 7, after 49 steps)"]
    with pytest.raises(ArithmeticError) as caught:
        make_vec_env("envs:Broken-v0", 2, seed=7).reset()
    assert caught.value.__notes__ == ["(raised by reset() of envs:Broken-v0, seed 7, after 0 steps)"]


BAD_STEPS = {
    "shape": ((np.zeros(3, np.float32), 0.0, False, False, {}), "observation of shape (3,)"),
    "dtype": ((np.zeros(2, np.complex64), 0.0, False, False, {}), "observation of type complex64"),
    "reward": ((np.zeros(2, np.float32), None, False, False, {}), "reward None"),
    "rewards": ((np.zeros(2, np.float32), np.zeros(1), False, False, {}), "reward [0.]"),
    "text": ((np.zeros(2, np.float32), "1", False, False, {}), "reward 1"),
    "ends": ((np.zeros(2, np.float32), 0.0, np.zeros(2), False, {}), "for terminated and truncated"),
    "four": ((np.zeros(2, np.float32), 0.0, False, {}), "returned 4 values"),
}


def play(env, steps):
    for _ in range(steps):
        env.step(np.zeros(env.num_envs, np.int64))


class BadStep(OneArray):
    """Keeps the contract for 100 steps."""

    steps = 0

    def __init__(self, result):
        self.result = result

    def step(self, action):
        self.steps += 1
        return super().step(action) if self.steps < 100 else self.result


@pytest.mark.parametrize(("result", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_what_breaks_the_contract_in_a_late_step_says_how_and_where(register, result, message):
    register("BadStep-v0", entry_point=BadStep, result=result)
    env = make_vec_env("BadStep-v0", 2, seed=7)
    env.reset()
    with pytest.raises(BrokenContract, match=re.escape(message)) as caught:
        play(env, 100)
    assert caught.value.__notes__ == ["(raised by step() of BadStep-v0, seed 7, after 99 steps)"]


def test_a_late_reset_that_breaks_the_contract_says_so_too(register):
    class BadReset(OneArray):
        resets = 0

        def reset(self, **kwargs):
            self.resets += 1
            return super().reset(**kwargs) if self.resets < 3 else (np.zeros((2, 2), np.float32), {})

    register("BadReset-v0", entry_point=BadReset)
    env = make_vec_env("BadReset-v0", 1, seed=2**31 - 1)
    env.reset()
    with pytest.raises(BrokenContract, match=re.escape("observation of shape (2, 2)")) as caught:
        play(env, 100)
    assert caught.value.__notes__ == ["(raised by reset() of BadReset-v0, seed 2147483647, after 4 steps)"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("NanReward", "the reward is nan"),
        ("InfiniteReward", "the reward is inf"),
        ("NanObsForEver", "the observation[0] is nan"),
    ],
)
def test_the_first_value_that_is_not_finite_is_logged(caplog, name, what):
    env = make_vec_env(f"envs:{name}-v0", 2, seed=7)
    env.reset()
    play(env, 149)
    assert not caplog.messages
    play(env, 30)
    assert caplog.messages == [f"{what} in envs:{name}-v0, seed 7, after 150 steps; further ones are not shown"]


@pytest.mark.parametrize("obs", [np.full(2, np.inf, np.float32), np.array([0.0, np.nan], np.float32)])
def test_so_is_one_in_the_last_observation_of_a_game(register, caplog, obs):
    register("BadStep-v0", entry_point=BadStep, result=(obs, 0.0, True, False, {}))
    env = make_vec_env("BadStep-v0", 2, seed=7)
    env.reset()
    play(env, 101)
    index = int(np.flatnonzero(~np.isfinite(obs))[0])
    where = "BadStep-v0, seed 7, after 100 steps; further ones are not shown"
    assert caplog.messages == [f"the last observation[{index}] is {obs[index]} in {where}"]
