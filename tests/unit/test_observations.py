"""Observations with a structure are flattened, checked on the environment that has them; ids with keyword arguments."""

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
from a3c_mp.run.preflight import probe_env
from a3c_mp.wrappers import BrokenContract, make_env, make_vec_env, split_id, with_kwargs

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


NO_SIZE = {
    "image": (Dict({"camera": Box(0, 255, (64, 64, 3), np.uint8)}), "has images (64, 64, 3) under 'camera'; only"),
    "planes": (Dict({"camera": Box(0, 255, (3, 64, 64), np.uint8)}), "has images (3, 64, 64) under 'camera'; only"),
    "text": (Tuple([Discrete(2), Text(5)]), "has observations of type Text under '1', which have no fixed size"),
    "sequence": (Sequence(Discrete(2)), "has observations of type Sequence, which have no fixed size"),
}


@pytest.mark.parametrize(("space", "message"), NO_SIZE.values(), ids=NO_SIZE)
def test_parts_that_are_no_vectors_are_refused_by_name(space, message, register):
    with pytest.raises(ConfigError, match=re.escape(message)):
        probe_env(register(entry_point=Structured, changes={"observation_space": space}), Discrete)


BROKEN = {
    "keys": ({"goal": OBS["goal"]}, "with other parts: ['goal'], its space has the parts ['goal', 'hands']"),
    "no dict": (OBS["goal"], "with other parts: a ndarray, its space has the parts"),
    "no tuple": ({**OBS, "hands": 1}, "with other parts: a int, its space has the parts [0, 1]"),
    "shape": ({**OBS, "goal": np.zeros(3, np.float32)}, "its observation[goal] of shape (3,), its space has (2,)"),
    "range": ({**OBS, "hands": (np.int64(0), OBS["hands"][1])}, "its observation[hands.0] 0, its space is Discrete(3"),
    "NaN": ({**OBS, "goal": np.full(2, np.nan, np.float32)}, "an observation with NaN or infinity"),
}


@pytest.mark.parametrize(("obs", "message"), BROKEN.values(), ids=BROKEN)
def test_a_structure_that_differs_from_its_space_is_refused(obs, message, register):
    env = make_env(register(entry_point=Structured, changes={"obs": obs}))
    with pytest.raises(BrokenContract, match=re.escape(message)):
        wrappers.check_contract(env)


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
    assert split_id(with_kwargs("X-v0", ["a=[1, 2]", "b=x y", "c=false", "d=None"])) == (
        "X-v0",
        {"a": [1, 2], "b": "x y", "c": False, "d": None},
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
