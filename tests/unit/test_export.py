"""Exported policies: onnxruntime chooses the same actions, and numpy alone can use the weights."""

import json

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from a3c_mp.algorithms import ddpg, dqn
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.run.export import write_onnx, write_safetensors
from a3c_mp.wrappers import ActionScaling, ImageAndVector

VECTOR, IMAGE = Box(-np.inf, np.inf, (3, 2), np.float32), Box(0, 255, (2, 36, 36), np.uint8)
BOTH = ImageAndVector((2, 36, 36), Box(-np.inf, np.inf, (3,), np.float32))
CHOICE, CHOICES, FORCE = Discrete(4), MultiDiscrete([2, 3]), Box(np.float32([-2, 0]), np.float32([2, 5]))
MIXED = Box(np.float32([900, -np.inf, 0]), np.float32([1000, np.inf, 3e38]))
NUMBER = 1000


def trained(net, space):
    """A net whose normalization and last layer are no longer as at the start."""
    net.norm.update(torch.from_numpy(np.stack([space.sample() for _ in range(20)])))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return net


slow = pytest.mark.slow
CASES = [
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICE), VECTOR, CHOICE, id="MLP"),
    pytest.param(lambda: make_actor_critic(IMAGE, CHOICE), IMAGE, CHOICE, id="convolutions"),
    pytest.param(lambda: make_actor_critic(BOTH, CHOICE), BOTH, CHOICE, id="both"),
    pytest.param(lambda: make_actor_critic(VECTOR, FORCE), VECTOR, FORCE, id="Gaussian"),
    pytest.param(lambda: make_actor_critic(VECTOR, MIXED), VECTOR, MIXED, id="bounds in part", marks=slow),
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICE, NetSpec(lstm=True)), VECTOR, CHOICE, id="LSTM"),
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICES), VECTOR, CHOICES, id="several choices", marks=slow),
    pytest.param(lambda: dqn.make_net(VECTOR, CHOICE), VECTOR, CHOICE, id="DQN", marks=slow),
    pytest.param(lambda: ddpg.make_net(VECTOR, FORCE), VECTOR, FORCE, id="DDPG", marks=slow),
]


def action_of(net, output, space):
    """The action that an environment gets."""
    if hasattr(net, "distribution"):
        return ActionScaling(space)(net.distribution(output).mode().numpy())
    return ActionScaling(space)(output.numpy()) if isinstance(space, Box) else output.argmax(1)


@pytest.mark.parametrize(("make_net", "obs_space", "action_space"), CASES)
@torch.inference_mode()
def test_onnxruntime_chooses_the_same_actions(make_net, obs_space, action_space, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0), obs_space.seed(0)
    net = trained(make_net(), obs_space)
    with torch.inference_mode(False):
        write_onnx(tmp_path / "p.onnx", net, (obs_space, action_space), {"steps": 7})
    session = onnxruntime.InferenceSession(tmp_path / "p.onnx")
    assert session.get_modelmeta().custom_metadata_map["steps"] == "7"
    state = net.initial_state(NUMBER) if hasattr(net, "lstm_size") else []
    for _ in range(1 + len(state)):  # from the state at the start, and from another
        obs = np.stack([obs_space.sample() for _ in range(NUMBER)])
        inputs = dict(zip(("obs", "state"), (obs, *(part.numpy() for part in state)), strict=False))
        action, output, *next_state = session.run(None, inputs)
        expected, *others = net(torch.from_numpy(obs), *state)
        np.testing.assert_allclose(output, expected, atol=1e-4)
        np.testing.assert_allclose(action, action_of(net, expected, action_space), rtol=1e-6, atol=1e-4)
        if state:
            np.testing.assert_allclose(next_state[0], others[1], atol=1e-4)
            state = others[1:]


def test_numpy_alone_can_use_the_weights(tmp_path):
    """The recipe of docs/export.md."""
    safetensors = pytest.importorskip("safetensors.numpy")
    net = trained(make_actor_critic(VECTOR, CHOICE), VECTOR)
    write_safetensors(tmp_path / "policy.safetensors", net, {"env_id": "X-v0"})
    obs = 9 * np.stack([VECTOR.sample() for _ in range(NUMBER)])  # some are far from the mean
    w = safetensors.load_file(tmp_path / "policy.safetensors")
    z = (obs - w["norm.shift"]) * w["norm.scale"]
    near = z.clip(-w["norm.knee"], w["norm.knee"])
    x = (near + np.sign(z) * np.log1p(abs(z - near))).reshape(len(obs), -1)
    for layer in ("policy.0", "policy.2"):
        x = np.tanh(x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"])
    actions = (x @ w["policy.4.weight"].T + w["policy.4.bias"]).argmax(axis=1)
    np.testing.assert_array_equal(actions, net(torch.from_numpy(obs))[0].argmax(1))
    header = (tmp_path / "policy.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"] == {"env_id": '"X-v0"'}
