"""Policies act in [-1, 1], environments in the units of their space, where its bounds are finite and usable."""

import numpy as np
import pytest
from envs import Env
from gymnasium.spaces import Box, Discrete
from harness import A3C_DATA
from hypothesis import given
from hypothesis import strategies as st

import play
from a3c_mp.algorithms import ddpg
from a3c_mp.errors import ConfigError
from a3c_mp.wrappers import ActionScaling

MAX32, MAX64, INF = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max), np.inf


def floats(largest):
    return st.floats(-largest, largest, width=32)


@given(st.tuples(floats(2.0**40), floats(2.0**40)).map(sorted), floats(3.0))
def test_actions_are_scaled_to_the_bounds_and_never_beyond(bounds, action):
    (low, high), space = bounds, Box(*np.float32(bounds), (1,))
    found = ActionScaling(space)(np.array([[-1.0], [1.0], [action]], np.float32))
    assert found.dtype == np.float32
    assert all(row in space for row in found)
    near = 1e-6 * max(-low, high, 1e-30)
    share = (np.clip(action, -1.0, 1.0) + 1) / 2
    assert found[:, 0] == pytest.approx([low, high, low + share * (high - low)], abs=near)


@given(floats(MAX32))
def test_actions_of_unit_bounds_keep_their_bits(action):
    found = ActionScaling(Box(-1.0, 1.0, (1,)))(given := np.array([[action]], np.float32))
    assert found.tobytes() == (given.clip(-1.0, 1.0) + 0.0).tobytes()


@pytest.mark.parametrize(
    ("low", "high", "dtype", "middle", "end"),
    [
        (0.0, 1000.0, np.float32, 500.0, 1000.0),
        (-1e6, 1e6, np.float32, 0.0, 1e6),
        (5.0, 5.0, np.float32, 5.0, 5.0),
        (-INF, INF, np.float32, 0.0, 9.0),
        (0.5, INF, np.float32, 0.5, 9.5),
        (-INF, -100.0, np.float32, -100.0, -100.0),
        (0.0, INF, np.float32, 0.0, 9.0),
        (-MAX32, MAX32, np.float32, 0.0, 9.0),
        (0.0, MAX32, np.float32, 0.0, 9.0),
        (-1e38, 1e38, np.float32, 0.0, 9.0),
        (-MAX64, MAX64, np.float64, 0.0, 9.0),
        (-65504.0, 65504.0, np.float16, 0.0, 9.0),
    ],
)
def test_each_dimension_follows_its_own_bounds_and_random_play_stays_inside(low, high, dtype, middle, end, monkeypatch):
    space = Box(np.array([low, -2.0], dtype), np.array([high, 2.0], dtype), dtype=dtype)
    with np.errstate(all="raise"):
        found = ActionScaling(space)(np.float32([[0.0, 0.0], [9.0, 9.0], [MAX32, -MAX32]]))
    assert found[:2].tolist() == [[middle, 0.0], [end, 2.0]]
    assert all(row in space for row in found if np.isfinite(row).all())
    monkeypatch.setattr(play, "probe_env", lambda *given: (None, space))
    chosen = play.make_random_policy("", 1)(np.zeros((50, 1)), np.zeros(50))
    assert all(row in space for row in chosen)
    assert abs(float(chosen.min())) <= 1e6 >= float(chosen.max())


class Squared(Env):
    """Its reward is finite where the square of the action is."""

    action_space = Box(-MAX32, MAX32, (2,))

    def step(self, action):
        with np.errstate(over="ignore"):
            return self.obs, -float(np.square(action).sum()), False, False, {}


def test_bounds_that_stand_for_infinity_are_none(register, run_inline):
    """The check before a run steps with actions that are usable, DDPG refuses such bounds, and the log says so."""
    env_id = register(entry_point=Squared)
    done = run_inline(A3C_DATA.script, "--env-id", env_id, "--unroll-length", "8", "--total-steps", "64")
    assert done.code == 0, done.err
    assert "Box(-3.4028235e+38, 3.4028235e+38, (2,), float32) not scaled · MLP" in done.out
    with pytest.raises(ConfigError, match="are not finite, or too far apart"):
        ddpg.make_net(Box(-1.0, 1.0, (3,)), Squared.action_space)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Discrete(3), ""),
        (Box(0.0, 9.0, ()), "scaled from [-1, 1]"),
        (Box(-INF, INF, (2, 2)), "not scaled"),
        (Box(np.float32([0, 0, -INF]), np.float32([1, INF, 1])), "1 of 3 scaled from [-1, 1]"),
    ],
    ids=str,
)
def test_the_log_says_which_actions_are_scaled(space, text):
    assert str(ActionScaling(space)) == text
