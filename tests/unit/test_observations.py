"""Observations become images, vectors or both, checked on the environment that has them; what an id can say besides."""

import re
import sys

import gymnasium
import numpy as np
import pytest
from envs import Env
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence, Text, Tuple
from gymnasium.wrappers import FlattenObservation, TransformObservation

from a3c_mp import wrappers
from a3c_mp.errors import ConfigError
from a3c_mp.nets import layers
from a3c_mp.run.preflight import probe_env
from a3c_mp.wrappers import (
    BrokenContract,
    Extras,
    extras_of,
    make_env,
    make_vec_env,
    split_id,
    with_extras,
    with_kwargs,
)
from a3c_mp.wrappers.trial import check_contract

SPACE = Dict({"goal": Box(-1, 1, (2,)), "hands": Tuple([Discrete(3, start=1), MultiDiscrete([2, 2])])})
OBS = {"goal": np.array([0.5, -0.5], np.float32), "hands": (np.int64(2), np.array([1, 0]))}


class Structured(Env):
    """Its observation has parts."""

    observation_space, obs = SPACE, OBS


def test_a_structure_becomes_one_vector_whose_layout_is_named(register):
    env_id = register(entry_point=Structured)
    env = make_env(env_id)
    obs, _ = env.reset()
    np.testing.assert_array_equal(obs, [0.5, -0.5, 0, 1, 0, 0, 1, 1, 0])
    assert obs.dtype == np.float32
    assert wrappers.layout(env) == "goal 0-1, hands.0 2-4 one-hot, hands.1 5-8 one-hot"
    assert wrappers.layout(make_env("CartPole-v1")) == ""
    np.testing.assert_array_equal(make_vec_env(env_id, 2, seed=0).reset()[0], [obs, obs])
    assert probe_env(env_id, Discrete)[0].shape == (9,)


def test_a_single_number_becomes_a_vector_of_one_and_a_state_number_is_one_hot(register):
    number = {"observation_space": Box(-1, 1, (), np.float32), "obs": np.float32(0.5)}
    env = make_env(register(changes=number))
    assert env.observation_space.shape == (1,)
    assert env.reset()[0].tolist() == [0.5]
    assert wrappers.layout(env) == ""
    obs, _ = make_vec_env("FrozenLake-v1", 2, seed=0).reset()
    np.testing.assert_array_equal(obs, np.eye(16, dtype=np.float32)[[0, 0]])


@pytest.mark.parametrize("fields", [(), ("last", "step", "absent")], ids=str)
def test_of_infos_only_what_is_declared_is_passed_on_whatever_else_they_say(fields):
    """And a declared one as it is, also where an episode ends: 1.5, 2, 3.5, ... of its last step."""
    env = make_vec_env("envs:Restless-v0", 3, seed=0, fields=fields)
    obs, infos = env.reset()
    assert infos == {}
    for _ in range(50):
        before = obs
        obs, _, terminated, truncated, infos = env.step(np.zeros(3, int))
        done = terminated | truncated
        final = {"final_obs", "_final_obs", "final_info", "_final_info"} if done.any() else set()
        assert final <= infos.keys() <= final | {*fields} - {"absent"}
        if done.any():
            assert (infos["final_obs"][done] == before[done] + [0, 1]).all()
        if fields:
            assert infos["step"] == [t + 1 + 0.5 * ((t + 1) % 2) for _, t in before.tolist()]


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 40, 44), dtype=np.uint8)
GREY, FOUR = PIXELS[:1], PIXELS[:4]
IMAGES = {
    "grey": (np.uint8, 0, 255, GREY, lambda image: image[0]),
    "channels last": (np.uint8, 0, 255, FOUR, lambda image: image.transpose(1, 2, 0)),
    "grey frames": (np.uint8, 0, 255, FOUR, lambda image: image[..., None]),
    "grey frames last": (np.uint8, 0, 255, FOUR, lambda image: image.transpose(1, 2, 0)[:, :, None]),
    "frames": (np.uint8, 0, 255, PIXELS, lambda image: image.reshape(4, 3, 40, 44)),
    "frames, channels last": (
        np.uint8,
        0,
        255,
        PIXELS,
        lambda image: image.reshape(4, 3, 40, 44).transpose(0, 2, 3, 1),
    ),
    "0 to 1": (np.float32, 0, 1, FOUR, lambda image: image / 255),
    "-1 to 1, channels last": (np.float64, -1, 1, FOUR, lambda image: image.transpose(1, 2, 0) / 127.5 - 1),
    "grey, 0 to 1": (np.float32, 0, 1, GREY, lambda image: image[0] / 255),
    "integers": (np.int32, 0, 255, FOUR, lambda image: image),
}


@pytest.mark.parametrize(("dtype", "low", "high", "image", "made"), IMAGES.values(), ids=IMAGES)
def test_an_image_of_any_form_is_bytes_with_channels_first(dtype, low, high, image, made, register):
    obs = made(image).astype(dtype)
    env = make_env(register(changes={"observation_space": Box(low, high, obs.shape, dtype), "obs": obs}))
    assert env.observation_space == Box(0, 255, image.shape, np.uint8)
    np.testing.assert_array_equal(env.reset()[0], image)
    assert layers.image_shape(env.observation_space) == image.shape


VECTORS = {
    "rows of features": Box(-np.inf, np.inf, (40, 40)),
    "scales of their own": Box(np.zeros((40, 40), np.float32), np.arange(1600, dtype=np.float32).reshape(40, 40) + 1),
    "numbers of things": Box(0, 5976, (40, 79), np.int16),
    "small": Box(0, 255, (7, 7, 3), np.uint8),
    "five axes": Box(0, 255, (2, 2, 2, 40, 40), np.uint8),
}


@pytest.mark.parametrize("space", VECTORS.values(), ids=VECTORS)
def test_arrays_that_are_no_images_stay_as_they_are(space, register):
    env = make_env(register(changes={"observation_space": space, "obs": space.sample()}))
    assert env.observation_space.shape == space.shape
    assert not layers.is_image(env.observation_space)


class Mission(gymnasium.Space):
    """As Minigrid has it, which is no `Text`."""

    def __init__(self):
        super().__init__(dtype=str)


class Video(Env):
    """Brighter with each step; a number beside the picture counts the steps, and a text says nothing."""

    def __init__(self, **parts):
        self.observation_space = Dict(
            picture=Box(0, 255, (80, 88), np.uint8), step=Box(0, 9, (1,)), text=Mission(), none=Box(0, 1, (0,))
        )
        if not parts.get("beside", True):
            self.observation_space = self.observation_space["picture"]

    def _obs(self):
        picture = np.full((80, 88), 10 * self.t, np.uint8)
        obs = {"picture": picture, "step": np.float32([self.t]), "text": "abc", "none": np.zeros(0)}
        return obs if isinstance(self.observation_space, Dict) else picture

    def reset(self, **kwargs):
        self.t = 1
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return (self._obs(), *self.rest)


@pytest.mark.parametrize("beside", [True, False])
def test_images_are_scaled_and_stacked_from_zeros_on(beside, register):
    env_id = register(entry_point=Video, beside=beside)
    env = make_env(with_extras(env_id, {"frame_size": 40, "frame_stack": 3}))
    assert layers.image_shape(env.observation_space) == (3, 40, 40)
    for _ in range(2):
        obs = [env.reset()[0], *(env.step(0)[0] for _ in range(3))]
        images = [each[: 3 * 40 * 40].reshape(3, 40, 40) if beside else each for each in obs]
        assert [image[:, 7, 7].tolist() for image in images] == [[0, 0, 10], [0, 10, 20], [10, 20, 30], [20, 30, 40]]
        assert not beside or [each[-1] for each in obs] == [1, 2, 3, 4]
    of = "of picture (80, 88) uint8" if beside else "of (80, 88) uint8"
    rest = ", step 4800; left out: text (text), none (empty)" if beside else ""
    assert wrappers.layout(env) == f"image (3, 40, 40) {of}, 3 frames{rest}"
    vector = make_vec_env(with_extras(env_id, {"frame_stack": 2}), 2, seed=0)
    vector.reset()
    np.testing.assert_array_equal(vector.step(np.zeros(2, int))[0][0].ravel()[[0, 80 * 88]], [10, 20])


def test_the_log_says_that_numbers_of_an_image_become_levels(register):
    class Float(Env):
        observation_space = Box(-1, 1, (40, 48), np.float32)

    assert wrappers.layout(make_env(register(entry_point=Float))) == (
        "image (1, 40, 48) of (40, 48) float32 in 256 levels from -1 to 1"
    )


@pytest.mark.parametrize(
    ("keys", "shape", "layout"),
    [
        (("step",), (1,), "step 0"),
        (("picture",), (1, 80, 88), "image (1, 80, 88) of picture (80, 88) uint8"),
        (("picture", "step"), (7041,), "image (1, 80, 88) of picture (80, 88) uint8, step 7040"),
    ],
    ids=str,
)
def test_parts_are_chosen_by_name(keys, shape, layout, register):
    env = make_env(with_extras(register(entry_point=Video), {"obs_keys": keys}))
    assert env.observation_space.shape == env.reset()[0].shape == shape
    assert wrappers.layout(env) == layout


def test_images_of_one_size_are_the_channels_of_one(register):
    space = Dict(left=Box(0, 255, (40, 40, 3), np.uint8), depth=Box(0, 1, (40, 40)))
    obs = {"left": np.full((40, 40, 3), 7, np.uint8), "depth": np.full((40, 40), 1 / 255, np.float32)}
    env = make_env(register(changes={"observation_space": space, "obs": obs}))
    assert env.reset()[0][:, 5, 5].tolist() == [7, 7, 7, 1]
    assert probe_env("Custom-v0", Discrete)[0] == Box(0, 255, (4, 40, 40), np.uint8)


CAMERA = Box(0, 255, (64, 64, 3), np.uint8)
REFUSED = {
    "sizes": (
        Dict(a=CAMERA, b=Box(0, 255, (40, 40), np.uint8)),
        {},
        "of several sizes: a (64, 64, 3), b (40, 40); --frame-size",
    ),
    "text": (Text(5), {}, "has observations of type Text, which have no fixed size; give --wrapper module:Class"),
    "sequence": (
        Tuple([Discrete(2), Sequence(Discrete(2))]),
        {},
        "of type Sequence under '1', which have no fixed size; choose others by --obs-keys, or give --wrapper",
    ),
    "no bounds": (
        Box(-np.inf, np.inf, (3, 64, 64)),
        {},
        "without the same finite bounds for all pixels; correct its observation_space; --wrapper gymnasium.wrappers:Fl",
    ),
    "no part": (
        Dict(a=CAMERA),
        {"obs_keys": ("b",)},
        "obs-keys=b: there is no such part in the observations of Custom-v0",
    ),
    "no image": (Box(-1, 1, (3,)), {"frame_size": 84}, "frame-size=84: Custom-v0#frame_size=84 has no images"),
    "no stack": (Discrete(3), {"frame_stack": 4}, "frame-stack=4: Custom-v0#frame_stack=4 has no images"),
    "no module": (
        CAMERA,
        {"wrapper": ("nowhere:At",)},
        "wrapper=nowhere:At: ModuleNotFoundError: No module named 'nowhere'",
    ),
    "no class": (
        CAMERA,
        {"wrapper": ("envs:At",)},
        "wrapper=envs:At: AttributeError: envs has no At; must be module:Class",
    ),
    "no wrapper": (CAMERA, {"wrapper": ("builtins:id",)}, "TypeError: it returned a int, must be a gymnasium.Wrapper"),
    "no argument": (CAMERA, {"wrapper": ("gymnasium.wrappers:TimeLimit,x=1",)}, "unexpected keyword argument 'x'"),
}


@pytest.mark.parametrize(("space", "extras", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_with_what_helps(space, extras, message, register):
    env_id = register(entry_point=Structured, changes={"observation_space": space})
    with pytest.raises(ConfigError, match=re.escape(message)):
        probe_env(with_extras(env_id, extras), Discrete)


def test_wrappers_are_applied_in_their_order_with_their_arguments(register):
    register(changes={"observation_space": Box(0, 255, (80, 88, 3), np.uint8), "obs": np.zeros((80, 88, 3), np.uint8)})
    names = (
        "gymnasium.wrappers:ResizeObservation,shape=(40, 48)",
        "gymnasium.wrappers:GrayscaleObservation,keep_dim=true",
    )
    env_id = with_extras("Custom-v0", {"wrapper": names, "frame_stack": 2})
    assert extras_of(env_id) == Extras(wrapper=names, frame_stack=2)
    assert split_id(env_id) == ("Custom-v0", {})
    assert make_env(env_id).reset()[0].shape == (2, 40, 48)
    with_more = with_kwargs(with_extras(env_id, {"frame_stack": 3}), ["a=x#y&z"])
    assert extras_of(with_more) == Extras(wrapper=names, frame_stack=3)
    assert split_id(with_more) == ("Custom-v0", {"a": "x#y&z"})


def test_an_atari_game_has_other_sizes_and_numbers_of_frames_and_in_a_wrapper_is_like_any_other():
    env_id = with_extras("PongNoFrameskip-v4", {"frame_size": 42, "frame_stack": 2})
    single, vector = make_env(env_id), make_vec_env(env_id, 1, seed=0)
    assert single.reset()[0].shape == vector.reset()[0][0].shape == (2, 42, 42)
    wrapped = with_extras(env_id, {"wrapper": ["gymnasium.wrappers:AtariPreprocessing"]})
    assert not wrappers.is_atari(wrapped)
    assert make_vec_env(wrapped, 1, seed=0).reset()[0].shape == (1, 2, 42, 42)


BROKEN = {
    "keys": ({"goal": OBS["goal"]}, "with other parts: ['goal'], its space has the parts ['goal', 'hands']"),
    "no dict": (OBS["goal"], "with other parts: a ndarray, its space has the parts"),
    "no tuple": ({**OBS, "hands": 1}, "with other parts: a int, its space has the parts [0, 1]"),
    "shape": ({**OBS, "goal": np.zeros(3, np.float32)}, "its observation[goal] of shape (3,), its space has (2,)"),
    "range": ({**OBS, "hands": (np.int64(0), OBS["hands"][1])}, "its observation[hands.0] 0, its space is Discrete(3"),
    "NaN": ({**OBS, "goal": np.full(2, np.nan, np.float32)}, "its observation[goal] with NaN or infinity"),
}


@pytest.mark.parametrize(("obs", "message"), BROKEN.values(), ids=BROKEN)
def test_a_structure_that_differs_from_its_space_is_refused(obs, message, register):
    env = make_env(register(entry_point=Structured, changes={"obs": obs}))
    with pytest.raises(BrokenContract, match=re.escape(message)):
        check_contract(env)


class Far(Env):
    """Its observation [4] moves by up to 9 near a place that is far from 0, and a constant, and is random at 0."""

    def __init__(self, at, dtype):
        self.at, self.observation_space = at, Box(-(2**60), 2**60, (4,), dtype)

    @property
    def obs(self):
        numbers = np.array([self.at, self.at, 7, 0]) + self.np_random.random(4) * [0, 9, 1e-15, 5]
        return numbers.astype(self.observation_space.dtype)


@pytest.mark.parametrize(
    ("at", "dtype", "lost"),
    [(1e9, np.float64, "1"), (1e6, np.float64, ""), (1e9, np.float32, ""), (1e9, np.int64, "1")],
)
def test_numbers_that_float32_cannot_tell_apart_are_named(at, dtype, lost, register):
    assert check_contract(make_env(register(entry_point=Far, at=at, dtype=dtype))).lost == lost


def test_a_part_that_is_not_used_may_have_any_values(register):
    env_id = register(entry_point=Structured, changes={"obs": {**OBS, "goal": np.full(2, np.inf, np.float32)}})
    check_contract(make_env(with_extras(env_id, {"obs_keys": ["hands"]})))


def test_a_choice_may_be_of_another_dtype(register):
    env = make_env(register(entry_point=Structured))
    expected = env.reset()[0]
    env.unwrapped.obs = {**OBS, "hands": tuple(np.asarray(choice).astype(np.uint64)[()] for choice in OBS["hands"])}
    np.testing.assert_array_equal(env.reset()[0], expected)


@pytest.mark.parametrize("choice", [np.int64(0), np.float64(2.5), np.int64(2**32 + 2)], ids=str)
def test_a_choice_that_later_lies_outside_its_space_is_refused(choice, register):
    env_id = register(entry_point=Structured)
    env = make_env(env_id)
    env.reset()
    env.unwrapped.obs = {**OBS, "hands": (choice, OBS["hands"][1])}
    with pytest.raises(ValueError, match=rf"observation hands\.0 is {choice}, its space is Discrete\(3"):
        env.step(0)


def test_the_contract_is_that_of_the_wrapped_environment(register):
    """An environment's own wrappers may flatten its observations, or repair them."""

    def repaired():
        class Unflattened(Structured):
            obs = OBS["goal"]  # no Dict, as its space says

        return TransformObservation(Unflattened(), lambda obs: obs, Box(-1, 1, (2,)))

    register("Flat-v0", entry_point=lambda: FlattenObservation(Structured()))
    register("Repaired-v0", entry_point=repaired)
    for env_id, shape in (("Flat-v0", (9,)), ("Repaired-v0", (2,))):
        assert probe_env(env_id, Discrete)[0].shape == shape


def test_an_id_may_have_keyword_arguments():
    assert with_kwargs("X-v0?a=1", ["b=x y", "a=[1, 2]"]) == "X-v0?a=%5B1%2C+2%5D&b=x+y"
    assert split_id(with_kwargs("X-v0", ["a=[1, 2]", "b=x y", "c=false", "d=None", "e={{}}"])) == (
        "X-v0",
        {"a": [1, 2], "b": "x y", "c": False, "d": None, "e": "{{}}"},
    )
    assert make_vec_env("FrozenLake-v1?map_name=8x8", 1, seed=0).reset()[0].shape == (1, 64)
    ale = make_env("ALE/Pong-v5?repeat_action_probability=0.5").unwrapped.ale
    assert ale.getFloat("repeat_action_probability") == 0.5
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        make_env("CartPole-v1?size=5")


def test_modules_in_the_current_folder_are_found(tmp_path, monkeypatch, register):
    (tmp_path / "here_only.py").write_text("import gymnasium\ngymnasium.register('Here-v0', 'envs:Env')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    assert isinstance(make_env("here_only:Here-v0"), gymnasium.Env)
