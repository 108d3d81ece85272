"""Both Atari paths are one environment, with raw rewards; resets, ends, lives and actions follow the contract."""

import math
import re
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from envs import Env
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode

from a3c_mp import wrappers
from a3c_mp.errors import ConfigError
from a3c_mp.run.preflight import probe_env
from a3c_mp.wrappers import BrokenContract, atari, make_env, make_vec_env, num_choices


def test_a_time_limit_of_an_atari_game_is_refused_as_the_vector_environment_has_none(register):
    register()  # a registry of this test's own
    gymnasium.register("Short-v0", entry_point="ale_py.env:AtariEnv", kwargs={"game": "pong"}, max_episode_steps=1000)
    with pytest.raises(ConfigError, match="env-id=Short-v0: Short-v0 has a time limit or wrappers of its own"):
        probe_env("Short-v0")


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


class SimulatorEnv(Env):
    """Counts those that are open; their `close` fails at its end, and the constructor of the third."""

    opened: ClassVar[list] = []
    closed: ClassVar[list] = []

    def __init__(self):
        if len(self.opened) == 2:
            raise OSError("the port is in use")
        self.opened.append(self)

    def close(self):
        self.closed.append(self)
        raise AttributeError("'NoneType' object has no attribute 'close'")


def test_all_that_was_made_is_closed_where_a_close_a_constructor_or_a_wrapper_fails(register, monkeypatch):
    env_id = register(entry_point=SimulatorEnv)
    for make, times in (
        (lambda: make_vec_env(env_id, 2, seed=0).close(), 1),
        (lambda: make_vec_env(env_id, 3, seed=0), 1),
        (lambda: wrappers.spaces(env_id), 2),
        (lambda: make_env(f"{env_id}#wrapper=os:path"), 2),
    ):
        monkeypatch.setattr(SimulatorEnv, "opened", [])
        monkeypatch.setattr(SimulatorEnv, "closed", [])
        for _ in range(times):
            with suppress(OSError, wrappers.UnsupportedEnv):
                make()
        assert SimulatorEnv.closed[:2] == SimulatorEnv.opened
        assert len(SimulatorEnv.opened) == 2


@pytest.mark.parametrize(("env_id", "sticky"), [("PongNoFrameskip-v4", 0.0), ("ALE/Pong-v5", 0.25)])
def test_sticky_actions_follow_the_spec(env_id, sticky):
    assert make_env(env_id).unwrapped.ale.getFloat("repeat_action_probability") == sticky


def test_truncated_games_bring_their_final_observation(monkeypatch):
    short = {"max_num_frames_per_episode": 40}
    monkeypatch.setattr(atari, "AtariVectorEnv", lambda **settings: AtariVectorEnv(**{**settings, **short}))
    env = make_vec_env("PongNoFrameskip-v4", 2, seed=0)
    env.reset()
    steps = [env.step(np.array([0, 0])) for _ in range(10)]
    assert [truncated.tolist() for _, _, _, truncated, _ in steps] == 9 * [[False, False]] + [[True, True]]
    obs, _, terminated, _, infos = steps[-1]
    assert not terminated.any()
    np.testing.assert_array_equal(infos["final_obs"][:, 2], steps[-2][0][:, 3])
    assert not obs[:, :3].any(), "a new game starts with an empty stack"


class OneArray(Env):
    """Episodes of two steps; every observation is written into the same array, of all environments if it is shared."""

    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    shared = np.zeros(2, np.float32)

    def __init__(self, is_shared=False):
        self.obs = self.shared if is_shared else np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, False, bool(self.obs[0] == 2), {}


def test_an_environment_is_reset_in_the_step_that_ends_its_episode_and_the_final_observation_stays(register):
    env = make_vec_env(register(entry_point=OneArray), 3, seed=0)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    np.testing.assert_array_equal(env.reset()[0], 0)
    np.testing.assert_array_equal(env.step(np.zeros(3, np.int64))[0], 1)
    obs, _, _, truncated, infos = env.step(np.zeros(3, np.int64))
    assert truncated.all()
    np.testing.assert_array_equal(infos["final_obs"], 2)
    np.testing.assert_array_equal(obs, 0)


def test_environments_may_write_their_observations_to_one_and_the_same_array(register):
    env = make_vec_env(register(entry_point=OneArray, is_shared=True), 3, seed=0)
    np.testing.assert_array_equal(env.reset()[0], 0)
    obs = env.step(np.zeros(3, np.int64))[0]  # the second one's game ends there, as all have counted together
    np.testing.assert_array_equal(obs, [[1, 1], [0, 0], [1, 1]])


BITS, FORCE = MultiBinary(2), Box(np.float32([-1, 2]), np.float32([1, 5]))
ACTIONS = {
    "Discrete": (Discrete(3, start=-1), [3], 2, 1),
    "32 bits": (Discrete(3, dtype=np.int32), [3], 2, 2),
    "MultiDiscrete": (MultiDiscrete([2, 3], start=[5, -1]), [2, 3], [1, 2], [6, 1]),
    "Tuple": (
        Tuple([Discrete(2, start=1), MultiDiscrete([3, 2]), BITS]),
        [2, 3, 2, 2, 2],
        [1, 2, 0, 0, 1],
        (2, [2, 0], [0, 1]),
    ),
    "Dict": (Dict({"b": Discrete(2), "a": Dict(c=Discrete(4, start=1))}), [4, 2], [3, 0], {"a": {"c": 4}, "b": 0}),
    "forces": (Dict({"b": FORCE, "a": Box(-3, 3, (1, 1))}), [], [0.5, 1, 4], {"a": [[0.5]], "b": [1, 4]}),
}


class Told(Env):
    """Its action masks, where it has one, allow the last choice of each part."""

    def reset(self, **kwargs):
        return self.obs, self.info

    def step(self, action):
        self.action = action
        return (self.obs, *self.rest[:-1], self.info)

    info: ClassVar[dict] = {}


@pytest.mark.parametrize(("space", "sizes", "action", "own"), ACTIONS.values(), ids=ACTIONS)
def test_actions_are_one_array_whose_choices_begin_at_0(space, sizes, action, own, register):
    env_id = register(entry_point=Told, changes={"action_space": space})
    env = make_env(env_id)
    env.reset()
    assert num_choices(env.action_space).tolist() == sizes
    env.step(np.asarray(action))
    assert env.unwrapped.action in space
    np.testing.assert_equal(env.unwrapped.action, own)
    tape = []
    heartbeats = SimpleNamespace(starting=lambda: tape.append("starting"), beat=lambda: tape.append("beat"))
    assert probe_env(env_id, heartbeats=heartbeats)[1] == env.action_space
    assert tape == ["starting", *4 * ["beat"], "starting"]
    vector = make_vec_env(env_id, 2, seed=0)
    vector.reset()
    vector.step(np.array([action, action]))
    np.testing.assert_equal(vector.unwrapped.envs[0].unwrapped.action, own)


def test_masks_of_several_parts_are_in_the_order_of_their_actions(register):
    space = Tuple([Dict({"b": Discrete(2), "a": MultiDiscrete([3, 2])}), Discrete(2, start=1)])
    mask = ({"b": [0, 1], "a": (np.array([0, 0, 1]), np.array([0, 1]))}, np.array([1, 0]))
    info = {"action_mask": mask}
    env = make_vec_env(register(entry_point=Told, changes={"action_space": space, "info": info}), 1, seed=0)
    env.reset()
    assert env.mask.tolist() == [[False, False, True, False, True, False, True, True, False]]


PONG, PENDULUM = "PongNoFrameskip-v4", "Pendulum-v1"
BAD_ACTIONS = [(PONG, [6, 0]), (PONG, [-1, 0]), (PONG, [0]), (PONG, [[0], [0]]), (PENDULUM, [[np.nan], [0.0]])]


@pytest.mark.parametrize(("env_id", "bad"), BAD_ACTIONS)
def test_actions_outside_the_space_are_refused(env_id, bad):
    env = make_vec_env(env_id, 2, seed=0)
    env.reset()
    with pytest.raises(ValueError, match="actions"):
        env.step(np.array(bad))


@pytest.mark.parametrize(("env_id", "fix"), [("PongNoFrameskp-v4", "Did you mean"), ("Pong-v4", "use PongNoFrameskip")])
def test_unknown_and_unsupported_ids_say_what_to_do(env_id, fix):
    with pytest.raises((gymnasium.error.Error, ValueError), match=fix):
        make_env(env_id)


def picture(shape):
    """Attributes of an environment: every pixel says which row, column and channel it is of."""
    obs = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    return {"observation_space": gymnasium.spaces.Box(0, 255, shape, np.uint8), "obs": obs}


@pytest.mark.parametrize(
    ("shape", "channels_first"),
    [((3, 84, 84), (3, 84, 84)), ((84, 84, 3), (3, 84, 84)), ((1, 48, 64), (1, 48, 64)), ((7, 7, 3), (7, 7, 3))],
)
def test_the_channels_of_an_image_are_its_smaller_outer_axis_and_come_first(register, shape, channels_first):
    env_id = register(changes=picture(shape))
    env = make_env(env_id)
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape == channels_first
    assert make_vec_env(env_id, 2, seed=0).single_observation_space == env.observation_space
    raw, _ = env.unwrapped.reset()
    np.testing.assert_array_equal(obs, raw if shape == channels_first else raw.transpose(2, 0, 1))


def test_images_whose_channels_cannot_be_told_are_refused_and_small_ones_stay_as_they_are(register):
    with pytest.raises(ValueError, match=r"\(84, 84, 84\).* channels first or last"):
        make_env(register(changes=picture((84, 84, 84))))
    assert make_env(register(changes=picture((8, 8, 8)))).reset()[0].shape == (8, 8, 8)


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


def test_of_an_atari_id_no_frame_skip_but_4_may_be_asked_for():
    for env_id in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
        with pytest.raises(ValueError, match="other frame skips than 4 are not supported"):
            make_vec_env(f"{env_id}?frameskip=1", 1, seed=0)
        assert make_vec_env(f"{env_id}?frameskip=4", 1, seed=0).num_envs == 1


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


@pytest.mark.parametrize("method", ["reset", "step"])
def test_what_an_environment_raises_says_where(register, method):
    env = make_vec_env(register(changes={method: lambda *_, **__: 1 / 0}), 2, seed=7)
    with pytest.raises(ZeroDivisionError) as caught:
        play(env, 1)
    assert caught.value.__notes__ == [f"(raised by {method}() of Custom-v0, seed 7, after 0 steps)"]


@pytest.mark.parametrize(("env_id", "each"), [("CartPole-v1", 3), ("PongNoFrameskip-v4", 1)], ids=str)
def test_every_environment_that_is_made_reset_or_stepped_is_a_heartbeat(env_id, each):
    """Atari's step together, in C++."""
    counts = Counter()
    watch = SimpleNamespace(starting=lambda: counts.update(made=1), beat=lambda: counts.update(beats=1))
    env = make_vec_env(env_id, 3, seed=0, heartbeats=watch)
    assert counts == {"made": each}
    env.reset()
    assert counts["beats"] >= each
    counts.clear()
    for _ in range(50):
        env.step(np.zeros(3, np.int64))
    assert counts["beats"] >= 50 * each
    assert counts["made"] == 0


def play(env, steps):
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(env.num_envs, np.int64))


OBS = np.zeros(2, np.float32)
BAD_STEPS = {
    "shape": ((np.zeros(3, np.float32), 0.0, False, False, {}), "observation of shape (3,)"),
    "dtype": ((np.zeros(2, np.complex64), 0.0, False, False, {}), "observation of type complex64"),
    "reward": ((OBS, None, False, False, {}), "reward None"),
    "rewards": ((OBS, np.zeros(2), False, False, {}), "reward of shape (2,)"),
    "text": ((OBS, "1", False, False, {}), "reward 1"),
    "ends": ((OBS, 0.0, np.zeros(2), False, {}), "for terminated and truncated"),
    "four": ((OBS, 0.0, False, {}), "returned 4 values"),
}


class BadLater(OneArray):
    """Keeps the contract for 100 steps, or for 2 resets."""

    steps = resets = 0
    reset_result = None
    step_result = None

    def reset(self, **kwargs):
        self.resets += 1
        result = super().reset(**kwargs)
        return self.reset_result if self.reset_result and self.resets > 2 else result

    def step(self, action):
        self.steps += 1
        return self.step_result if self.step_result and self.steps >= 100 else super().step(action)


@pytest.mark.parametrize(("result", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_what_breaks_the_contract_in_a_late_step_says_how_and_where(register, result, message):
    env = make_vec_env(register(entry_point=BadLater, changes={"step_result": result}), 2, seed=7)
    with pytest.raises(BrokenContract, match=re.escape(message)) as caught:
        play(env, 100)
    assert caught.value.__notes__ == ["(raised by step() of Custom-v0, seed 7, after 99 steps)"]


def test_a_late_reset_that_breaks_the_contract_says_so_too(register):
    changes = {"reset_result": (np.zeros((2, 2), np.float32), {})}
    env = make_vec_env(register(entry_point=BadLater, changes=changes), 1, seed=2**31 - 1)
    with pytest.raises(BrokenContract, match=re.escape("observation of shape (2, 2)")) as caught:
        play(env, 100)
    assert caught.value.__notes__ == ["(raised by reset() of Custom-v0, seed 2147483647, after 4 steps)"]


@pytest.mark.parametrize(("given", "reward"), [(np.array([0.5]), 0.5), (-1e200, -math.inf)], ids=["array", "float64"])
def test_a_reward_is_a_number_of_float32(register, given, reward):
    """One in an array, and one beyond its range, which is infinite for learning."""
    env = make_vec_env(register(entry_point=Env, changes={"rest": (given, False, False, {})}), 2, seed=7)
    env.reset()
    assert env.step(np.zeros(2, int))[1].tolist() == [reward, reward]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("NanReward", "the reward is nan"),
        ("InfiniteReward", "the reward is inf"),
        ("NanObsForEver", "the observation[0] is nan"),
    ],
)
def test_the_first_value_that_is_not_finite_is_logged(caplog, name, what):
    play(make_vec_env(f"envs:{name}-v0", 2, seed=7), 179)
    assert caplog.messages == [f"{what} in envs:{name}-v0, seed 7, after 150 steps; further ones are not shown"]


def test_so_is_one_in_the_last_observation_of_a_game(register, caplog):
    changes = {"step_result": (np.array([0.0, np.nan], np.float32), 0.0, True, False, {})}
    play(make_vec_env(register(entry_point=BadLater, changes=changes), 2, seed=7), 101)
    where = "Custom-v0, seed 7, after 100 steps; further ones are not shown"
    assert caplog.messages == [f"the last observation[1] is nan in {where}"]
