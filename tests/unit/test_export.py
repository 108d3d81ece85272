"""Exported policies: onnxruntime chooses the same actions, files say how they are used, numpy can use the weights."""

import json
import re
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from envs import Env
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten
from harness import ROOT, files_no_longer_than

from a3c_mp.algorithms import ddpg, dqn, td3
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import DEFAULT_NET, NetSpec, make_actor_critic
from a3c_mp.run.banner import net_name
from a3c_mp.run.export import parts_of, usage_of, write_onnx, write_safetensors
from a3c_mp.wrappers import ActionScaling, ImageAndVector, atari, make_env
from a3c_mp.wrappers.observations import as_array

VECTOR, IMAGE = Box(-np.inf, np.inf, (3, 2), np.float32), Box(0, 255, (2, 36, 36), np.uint8)
BOTH = ImageAndVector((2, 36, 36), Box(-np.inf, np.inf, (3,), np.float32))
CHOICE, CHOICES, SWITCHES = Discrete(4), MultiDiscrete([2, 3]), MultiBinary(3)
FORCE = Box(np.float32([-2, 0]), np.float32([2, 5]))
ONE = Box(-2, 2, ())
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
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICE), VECTOR, CHOICE, id="MLP", marks=slow),
    pytest.param(lambda: make_actor_critic(IMAGE, CHOICE), IMAGE, CHOICE, id="convolutions", marks=slow),
    pytest.param(lambda: make_actor_critic(BOTH, CHOICE), BOTH, CHOICE, id="both"),
    pytest.param(lambda: make_actor_critic(VECTOR, FORCE), VECTOR, FORCE, id="Gaussian"),
    pytest.param(lambda: make_actor_critic(VECTOR, MIXED), VECTOR, MIXED, id="bounds in part", marks=slow),
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICE, NetSpec(lstm=True)), VECTOR, CHOICE, id="LSTM"),
    pytest.param(lambda: make_actor_critic(VECTOR, CHOICES), VECTOR, CHOICES, id="several choices", marks=slow),
    pytest.param(lambda: make_actor_critic(VECTOR, SWITCHES), VECTOR, SWITCHES, id="switches", marks=slow),
    pytest.param(lambda: dqn.make_net(VECTOR, CHOICE, NetSpec(num_quantiles=5)), VECTOR, CHOICE, id="DQN", marks=slow),
    pytest.param(lambda: ddpg.make_net(VECTOR, FORCE), VECTOR, FORCE, id="DDPG", marks=slow),
    pytest.param(lambda: td3.make_net(VECTOR, FORCE), VECTOR, FORCE, id="TD3", marks=slow),
    pytest.param(lambda: ddpg.make_net(VECTOR, ONE), VECTOR, ONE, id="one number", marks=slow),
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


# ---- metadata, and the loops of docs/export.md


RICH = Dict({
    "goal": Box(-1, 1, (2,), np.float32), "hands": Tuple([Discrete(3, start=1), MultiDiscrete([2, 3])]),
    "load": Discrete(4, start=-1), "on": MultiBinary(2),
})  # fmt: skip


class Game(Env):
    observation_space = Dict({"goal": Box(-9, 9, (2,), np.float32), "load": Discrete(3, start=1)})
    obs = {"goal": np.zeros(2, np.float32), "load": 1}  # noqa: RUF012


def write(path, env_id, spec=DEFAULT_NET):
    """Write an untrained policy for an environment as `play.py` does; returns its net, and what is said of its use."""
    with closing(make_env(env_id)) as env:
        spaces = env.observation_space, env.action_space
    torch.manual_seed(0)
    net = make_actor_critic(*spaces, spec)
    usage = usage_of(env_id, net, spaces)
    write_onnx(path / "policy.onnx", net, spaces, {"env_id": env_id, "net": net_name(spec._asdict(), net), **usage})
    return net, usage


class Rich(Env):
    observation_space = RICH


def run_block(name, changes=()):
    """Run a program of the page in the current folder; returns its names."""
    code = re.search(rf"```python\n(# {name}\n.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL)[1]
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    exec(code, names := {})
    return names


@pytest.mark.parametrize(
    "spec", [pytest.param(DEFAULT_NET, id="MLP", marks=slow), pytest.param(NetSpec(lstm=True), id="LSTM")]
)
def test_the_loop_for_vectors_plays_a_game(spec, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "CartPole-v1", spec)
    assert run_block("play_vector.py")["score"] >= 8
    assert capsys.readouterr().out.startswith(
        f"CartPole-v1 MLP {'256, LSTM' if spec.lstm else '64 64'} {{'obs': {{'dtype'"
    )


def test_the_loop_for_a_dict_joins_its_parts_in_the_order_of_training(monkeypatch, register):
    env_id, spaces = register("Game-v0", Game), (Box(-9, 9, (5,), np.float32), CHOICE)
    usage = usage_of(env_id, make_actor_critic(*spaces), spaces)
    model = SimpleNamespace(custom_metadata_map={"inputs": json.dumps(usage["inputs"])})
    given = []
    session = SimpleNamespace(get_modelmeta=lambda: model, run=lambda _, inputs: given.append(inputs) or (0, 0))
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda path: session)
    names = run_block("play_dict.py")
    np.testing.assert_array_equal(given[0]["obs"], [[3, 4, 0, 1, 0]])
    assert given[0]["obs"].dtype == np.float32
    names["parts"][:] = json.loads(json.dumps(list(parts_of(as_array(Rich(), "Rich-v0").parts))))
    assert [part["name"] for part in names["parts"]] == ["goal", "hands.0", "hands.1", "load", "on"]
    assert [(part["first"], part["last"]) for part in names["parts"]] == [(0, 1), (2, 4), (5, 9), (10, 13), (14, 15)]
    RICH.seed(0)
    for obs in (RICH.sample() for _ in range(20)):
        values = obs | {"hands.0": obs["hands"][0], "hands.1": obs["hands"][1]}
        np.testing.assert_array_equal(names["vector"](values)[0], flatten(RICH, obs))


def test_the_loop_for_atari_prepares_screens_as_in_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atari, "NOOP_MAX", 1)  # chance decides how many no-ops there are first
    net, usage = write(tmp_path, "PongNoFrameskip-v4", NetSpec("a3c"))
    assert usage["inputs"]["obs"]["shape"] == (4, 84, 84)
    names = run_block("play_atari.py", [("27_000", "30")])
    with closing(make_env("PongNoFrameskip-v4")) as env:
        obs, _ = env.reset(seed=0)
        for _ in range(30):
            action, _ = names["session"].run(None, {"obs": obs[None]})
            obs, *_ = env.step(action[0])
    np.testing.assert_array_equal(names["obs"][0], obs)
    with torch.inference_mode():
        expected = net(torch.from_numpy(names["obs"]))[0]
    np.testing.assert_allclose(names["session"].run(None, {"obs": names["obs"]})[1], expected, atol=1e-4)


@pytest.mark.parametrize(("make_net", "obs_space", "action_space"), CASES)
def test_the_metadata_say_how_actions_follow_from_the_output(make_net, obs_space, action_space, register):
    """With numpy alone, by what they say; they are JSON without NaN or infinity."""
    obs_space.seed(0), torch.manual_seed(0)
    changes = {"observation_space": obs_space, "action_space": action_space, "obs": obs_space.sample()}
    net = trained(make_net(), obs_space)
    usage = usage_of(register(changes=changes), net, (obs_space, action_space))
    usage = json.loads(json.dumps(usage, allow_nan=False))
    obs = torch.from_numpy(np.stack([obs_space.sample() for _ in range(50)]))
    with torch.inference_mode():
        output, *_ = net(obs, *(net.initial_state(50) if hasattr(net, "initial_state") else []))
    said, action = usage["outputs"]["output"], usage["outputs"]["action"]
    assert said["shape"] == list(output.shape[1:])
    if isinstance(action_space, Box):
        center, half, low, high = (np.array(action[name], np.float64) for name in ("center", "half", "low", "high"))
        low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        found = (center + half * output.numpy().reshape(50, -1)[:, : len(center)]).clip(low, high)
    else:
        parts = np.split(output.numpy(), np.cumsum(said["parts"])[:-1], axis=1)
        found = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        assert action["dtype"] == "int64", "as the model gives them"
    found = found.reshape(50, *action["shape"])
    np.testing.assert_allclose(found, action_of(net, output, action_space), rtol=1e-5)


def test_a_net_that_cannot_be_exported_is_an_error_in_one_line(tmp_path):
    net = trained(make_actor_critic(VECTOR, CHOICE), VECTOR)
    forward = net.forward
    net.forward = lambda obs: forward(obs if float(obs.sum()) > 0 else -obs)
    with pytest.raises(ConfigError, match=r"export=.*: this net cannot be exported as ONNX \(.*\); use a name that"):
        write_onnx(tmp_path / "p.onnx", net, (VECTOR, CHOICE), {})
    assert not list(tmp_path.iterdir())


def test_numpy_alone_can_use_the_weights(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    net = trained(make_actor_critic(VECTOR, CHOICE), VECTOR)
    write_safetensors(tmp_path / "policy.safetensors", net, {"env_id": "X-v0"})
    with files_no_longer_than(64), pytest.raises(OSError, match="too large"):  # costs no file
        write_safetensors(tmp_path / "policy.safetensors", net, {"env_id": "Y-v0"})
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]
    obs = 9 * np.stack([VECTOR.sample() for _ in range(NUMBER)])  # some are far from the mean
    np.testing.assert_array_equal(run_block("weights.py")["choose"](obs), net(torch.from_numpy(obs))[0].argmax(1))
    net.tied = net.policy
    write_safetensors(tmp_path / "tied.safetensors", net, {})  # tensors that share their memory
    header = (tmp_path / "policy.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"] == {"env_id": '"X-v0"'}


@pytest.mark.parametrize(
    ("own", "start"),
    [
        (Discrete(3), None),
        (Discrete(3, start=2), 2),
        (Dict(a=Discrete(2), b=MultiDiscrete([2, 3], start=[1, 5])), [0, 1, 5]),
    ],
    ids=str,
)
def test_the_file_says_where_the_choices_of_an_environment_begin(own, start, register):
    env_id = register("Game-v0", type("Choosing", (Env,), {"action_space": own}))
    with closing(make_env(env_id)) as env:
        spaces = env.observation_space, env.action_space
    usage = usage_of(env_id, make_actor_critic(*spaces), spaces)
    assert usage["outputs"]["action"].get("start") == start
