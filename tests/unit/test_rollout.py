"""Rollouts as actors write them and the learner reads them."""

import numpy as np
import pytest
import torch
from envs import EPISODE_LENGTH
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.data.rollout import InfoField, Rollout, empty_rollout, minibatches, rollout_spec, write_step
from a3c_mp.errors import ConfigError
from a3c_mp.wrappers import make_vec_env

IMAGES = Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("name", ["reward", "action_mask"])
def test_a_name_that_is_taken_is_refused_for_a_field_of_ones_own(name):
    with pytest.raises(ConfigError, match=f"^rollout_fields={name}: .*; rename it"):
        rollout_spec(5, 3, VECTORS, Discrete(2), extra={name: InfoField()})


def test_a_rollout_made_from_the_spec_has_its_fields():
    spec = rollout_spec(5, 3, IMAGES, Discrete(6), extra={"angle": InfoField((2,), torch.float64)})
    rollout = empty_rollout(spec)
    assert list(rollout.fields()) == list(spec) == [*Rollout._fields[:-1], "angle"]
    for name, field in rollout.fields().items():
        steps = {"obs": 6, "value": 6, "lstm_state": 1}.get(name, 5)
        assert field.shape[:2] == (steps, 3), name
    assert rollout.extra["angle"].shape == (5, 3, 2)
    doubled = rollout.map(lambda field: torch.cat([field, field], 1)).fields()
    assert all(field.shape[1] == 6 for field in doubled.values())


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "params"),
    [
        (Discrete(7), (), torch.int64, 7),
        (Box(-1.0, 1.0, (2, 3)), (2, 3), torch.float32, 12),
        (MultiDiscrete([2, 4]), (2,), torch.int64, 6),
        (MultiBinary(3), (3,), torch.int64, 6),
    ],
    ids=str,
)
def test_fields_have_the_shape_and_dtype_of_their_space(space, shape, dtype, params):
    spec = rollout_spec(5, 3, Box(-1.0, 1.0, (3,), np.float64), space)
    assert spec["obs"] == ((6, 3, 3), torch.float32)
    assert spec["action"] == ((5, 3, *shape), dtype)
    assert spec["behaviour_logits"] == ((5, 3, params), torch.float32)


def test_write_step_fills_its_step_and_no_other():
    """Where an environment knows no lives, `False` stands for the whole batch."""
    rollout = empty_rollout(rollout_spec(4, 2, VECTORS, Discrete(2), extra={"angle": InfoField()}))
    rollout.life_lost.fill_(True)
    written = {"reward": np.array([1.5, -1.5]), "angle": np.array([0.5, 0.25]), "life_lost": False}
    expected = rollout.map(torch.clone).fields()
    write_step(rollout.fields(), 1, **written)
    for name, value in written.items():
        expected[name][1] = torch.as_tensor(value)
    for name, field in rollout.fields().items():
        assert torch.equal(field, expected[name]), name


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_added_field_is_what_the_infos_of_its_step_say_also_where_all_episodes_end(num_envs):
    """Terminated or, every third, truncated; where the infos lack it, 0."""
    env = make_vec_env("envs:Angle-v0", num_envs, seed=0, fields=["angle"])
    env.reset()
    for t in range(6 * EPISODE_LENGTH):
        *_, infos = env.step(np.zeros(num_envs, np.int64))
        episode, step = divmod(t, EPISODE_LENGTH)
        expected = 0.0 if step == 0 else 10.0 * episode + step + 1
        assert InfoField().read(infos, "angle", num_envs).tolist() == [expected] * num_envs
        assert InfoField((1,)).read(infos, "other", num_envs).tolist() == [[0.0]] * num_envs


@pytest.mark.parametrize(
    "values", [np.array([7.0, 3.0]), [7, np.float32(3)], [np.array(7.0), torch.tensor(3)]], ids=repr
)
def test_an_added_field_is_read_from_arrays_as_ataris_are_and_from_values_of_any_type(values):
    assert InfoField().read({"angle": values}, "angle", 2).tolist() == [7.0, 3.0]
    assert InfoField().read({"angle": [values[0], None]}, "angle", 2).tolist() == [7.0, 0.0]


@pytest.mark.parametrize("value", ["text", {}, [1.0], np.zeros((2, 1)), [[1.0], [2.0, 3.0]]], ids=repr)
def test_a_value_that_does_not_fit_an_added_field_is_refused_by_name(value):
    with pytest.raises(
        ValueError, match=r"^infos\['angle'\] is .*, rollout_fields says torch.float32 of shape \(2,\)$"
    ):
        InfoField((2,)).read({"angle": [np.zeros(2), value]}, "angle", 2)


@pytest.mark.parametrize("value", [-1, 300, np.int64(300), 2**70, 3.5, np.nan])
def test_a_number_that_an_added_field_cannot_hold_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^infos\['health'\] is .*, rollout_fields says torch.uint8 of shape \(\)$"):
        InfoField(dtype=torch.uint8).read({"health": [value]}, "health", 1)
    with pytest.raises(ValueError, match=r"rollout_fields says torch.bool of shape \(\)$"):
        InfoField(dtype=torch.bool).read({"health": [value]}, "health", 1)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**31))
def test_minibatches_take_every_sample_once_in_an_order_of_their_own(num_samples, batch_size, seed):
    rng = torch.Generator().manual_seed(seed)
    batches = minibatches(num_samples, batch_size, rng, torch.device("cpu"))
    order, sizes = torch.cat(batches).tolist(), [len(batch) for batch in batches]
    assert len(batches) == -(-num_samples // batch_size)
    assert sorted(order) == list(range(num_samples))
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1, "a small one would weigh as much as the others"
    if num_samples > 20:  # so that chance does not repeat one
        again = minibatches(num_samples, batch_size, rng, torch.device("cpu"))
        assert torch.cat(again).tolist() != order != list(range(num_samples))
