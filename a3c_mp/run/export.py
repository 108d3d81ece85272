"""Export of a trained policy as ONNX, or of its weights as safetensors."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from a3c_mp.errors import ConfigError
from a3c_mp.nets.actor_critic import ActorCritic

Head = Callable[[Tensor], Tensor]
"""output of a net [B, ...] -> action of the environment [B, ...]"""
EXAMPLES = 2
"""observations that the net is traced with; a batch of 1 would make the exporter drop the axis"""


class ExportedPolicy(nn.Module):
    """A policy as one function: (observations[, LSTM state]) -> (action, output of the net[, next state]).

    Args:
        net: with its observation normalization inside.
        head: chooses the action from the net's first output.
    """

    def __init__(self, net: nn.Module, head: Head):
        super().__init__()
        self.net, self.head = net, head

    def forward(self, obs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        output, *others = self.net(obs, *state)
        return self.head(output), output, *(others[1:] if state else ())


def head_of(net: nn.Module, action_space: gymnasium.Space) -> Head:
    """How an action follows from the output of a net: the likeliest one, that of the highest Q value, or DDPG's own."""
    if isinstance(net, ActorCritic):
        return bounded(net, action_space) if isinstance(action_space, Box) else lambda o: net.distribution(o).mode()
    return rescaled(action_space) if isinstance(action_space, Box) else lambda q: q.argmax(dim=-1)


def bounded(net: ActorCritic, space: Box) -> Head:
    """The mean of a Gaussian policy, clipped to the bounds of a space."""
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    return lambda params: net.distribution(params).mode().clamp(low, high)


def rescaled(space: Box) -> Head:
    """DDPG's action, from [-1, 1] to the bounds of a space."""
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    return lambda action: low + (action + 1) / 2 * (high - low)


def write_onnx(path: Path, policy: ExportedPolicy, obs_space: gymnasium.Space, description: Mapping[str, Any]) -> None:
    """Write a policy as an ONNX model with batches of any size.

    Inputs are `obs` and with an LSTM `state`, zeros at the start of an episode; outputs are `action`, `output` (logits,
    means and log deviations, Q values or DDPG's action in [-1, 1]) and `next_state`.

    Raises:
        ConfigError: the extra `export` is not installed.
        OSError: the file cannot be written.
    """
    lstm_size = getattr(policy.net, "lstm_size", 0)
    example = torch.from_numpy(obs_space.sample())[None].expand(EXAMPLES, *obs_space.shape or ()).contiguous()
    inputs: tuple[Tensor, ...] = (example, torch.zeros(EXAMPLES, lstm_size)) if lstm_size else (example,)
    batch = {0: torch.export.Dim("batch")}
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("export", path, "onnx and onnxscript are not installed", "pip install onnxscript") from None
    with only_errors("torch.onnx"):
        program = torch.onnx.export(
            policy.eval(),
            inputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=(batch, (batch,)) if lstm_size else (batch,),
            input_names=["obs", "state"][: len(inputs)],
            output_names=["action", "output", "next_state"][: 1 + len(inputs)],
        )
    assert program is not None
    program.model.metadata_props.update({name: json.dumps(value) for name, value in description.items()})
    program.save(path, external_data=False)


def write_safetensors(path: Path, net: nn.Module, description: Mapping[str, Any]) -> None:
    """Write the weights of a net, with the moments of its normalization, and a description as metadata.

    Raises:
        ConfigError: the extra `export` is not installed.
        OSError: the file cannot be written.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise ConfigError("export", path, "safetensors is not installed", "pip install safetensors") from None
    tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    path.write_bytes(save(tensors, {name: json.dumps(value) for name, value in description.items()}))


@contextmanager
def only_errors(logger: str) -> Iterator[None]:
    """Drop a library's warnings and log messages below errors."""
    level = logging.getLogger(logger).level
    logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger(logger).setLevel(level)
