"""A deterministic run that was interrupted and resumed ends with the very bits of one that never stopped.

Real actors and real learner processes; the first learner is this process, which spares the time to start one.
"""

import importlib
import json
import shutil

import pytest
import torch

from a3c_mp.checkpoint import is_fixed, list_checkpoints

SMALL = ["--num-actors", "2", "--num-envs", "2"]
CARTPOLE = ["--env-id", "CartPole-v1", "--stop-return", "501", *SMALL]
ROLLOUTS = [*CARTPOLE, "--unroll-length", "8"]
PONG = ["--env-id", "PongNoFrameskip-v4", *SMALL, "--unroll-length", "8", "--batch-size", "16"]
IMPALA = ["--lstm", "--batch-unrolls", "4", "--replay-proportion", "0.5", "--replay-size", "50", "--force-lag", "1"]
APEX = [
    *CARTPOLE,
    "--batch-size",
    "16",
    "--block-length",
    "8",
    "--n-step",
    "5",
    "--target-period",
    "7",
    "--save-replay",
]
APEX_REPLAY = ["--replay-size", "300", "--learning-starts", "100"]  # full before the resume
KINDS = {
    "data": ("train_a3c_data", 320, [*ROLLOUTS, "--batch-size", "16", "--slots-per-actor", "2"]),
    "grad": ("train_a3c_grad", 320, [*ROLLOUTS, "--batch-size", "8"]),  # two gradients of each rollout
    "impala": ("train_impala", 320, [*ROLLOUTS, *IMPALA, "--num-learners", "2", "--slots-per-actor", "2"]),
    "dqn": ("train_apex", 640, [*APEX, *APEX_REPLAY]),
}
SLOW = {
    "data, Pong": ("train_a3c_data", 320, [*PONG, "--slots-per-actor", "2"]),
    "grad, Pong": ("train_a3c_grad", 320, PONG),
    "ddpg": (
        "train_apex",
        640,
        ["--env-id", "Pendulum-v1", *SMALL, "--batch-size", "24", "--save-replay", *APEX_REPLAY],
    ),
}


@pytest.fixture
def train(tmp_path, monkeypatch):
    def run(script, *flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [script, *flags])
        assert importlib.import_module(script).main() == 0

    return run


def bits(value):
    """A state without its wall-clock time, in a form that is equal only where every bit is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items() if key != "wall_seconds"}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return value


def differing(one, other, name=""):
    """Names of the parts that are not the same."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{name}/{key}")]
    return [] if one == other else [name]


def state_of(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("script", "half", "flags"),
    [*KINDS.values(), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in SLOW.values())],
    ids=[*KINDS, *SLOW],
)
@pytest.mark.timeout(600)
def test_a_resumed_run_ends_bit_identical(train, tmp_path, script, half, flags):
    flags = [*flags, "--deterministic", "--checkpoint-steps", str(half), "--total-steps", str(2 * half)]
    train(script, *flags, "--run-name", "whole")
    last, middle = list_checkpoints(tmp_path / "runs/whole/checkpoints")
    assert is_fixed(middle)
    # as SIGKILL leaves it, after the first half
    halves = shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/halves") / "checkpoints"
    for file in halves.glob(f"*_{2 * half:012d}.*"):
        file.unlink()
    train(script, "--resume", "runs/halves")
    assert (halves / middle.name).exists()

    before, whole, resumed = state_of(middle), state_of(last), state_of(halves / last.name)
    assert before["steps"] == half
    assert whole["updates"] > before["updates"] > 0
    assert bits(whole["net"]) != bits(before["net"])
    assert differing(bits(resumed), bits(whole)) == []
    summaries = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("whole", "halves")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
