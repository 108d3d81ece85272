"""Actor-critic nets of the user's own, `--net module:function`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from a3c_mp.errors import ConfigError, one_line
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.images import is_image
from a3c_mp.nets.obs_norm import ObsNorm


class OwnActorCritic(ActorCritic):
    """Actor-critic around a module of the user's own, which gets normalized observations and returns plain outputs.

    Args:
        obs_space: of one environment.
        head: applied to the policy outputs.
        body: float observations [B, *obs_shape] -> (policy outputs [B, `head.num_outputs`], values [B]).
    """

    def __init__(self, obs_space: gymnasium.Space, head: ActionHead, body: nn.Module):
        assert obs_space.shape is not None
        super().__init__(ObsNorm(obs_space.shape, is_image(obs_space)), head)
        self.body = body

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs [B, ...] -> (logits [B, P], value [B])."""
        outputs, values = self.body(self.norm.convert(obs))
        return self.head(outputs).float(), values.float()


def make_own_net(name: str, obs_space: gymnasium.Space, action_space: gymnasium.Space, head: ActionHead) -> ActorCritic:
    """Make the net of `--net module:function` by calling `function(obs_space, action_space)`.

    Raises:
        ConfigError: there is no such function, it raises an error, or what it returns breaks the contract.
    """
    function = find_net_function(name)
    try:
        body = function(obs_space, action_space)
        if not isinstance(body, nn.Module):
            raise TypeError(f"it returned a {type(body).__name__}, must be a torch.nn.Module")
        net = OwnActorCritic(obs_space, head, body)
        check_own_net(net, obs_space)
    except Exception as error:  # code of the user's own can raise anything
        where = place_in(name.partition(":")[0], error)
        raise ConfigError(
            "net", name, f"{one_line(error)}{where}", "correct it; docs/nets.md has an example"
        ) from error
    return net


def place_in(module: str, error: Exception) -> str:
    """Return the last line of a module that an error came through, ` (nets.py:7)`; an empty string if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}:{lines[-1]})" if file and lines else ""


def find_net_function(name: str) -> Callable[[gymnasium.Space, gymnasium.Space], nn.Module]:
    """Return the function `module:function`; the current folder is searched last. Raises ConfigError."""
    module, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        fix = "must be module:function, in the current folder or installed"
        raise ConfigError("net", name, one_line(error), fix) from error
    if not callable(found):
        raise ConfigError("net", name, f"{function} is a {type(found).__name__}, must be a function")
    return found


@torch.no_grad()
def check_own_net(net: OwnActorCritic, obs_space: gymnasium.Space) -> None:
    """Raise an error unless a net can be trained and returns outputs and values of the right shapes."""
    for name, layer in net.body.named_modules():
        if (isinstance(layer, _DropoutNd) and layer.training and layer.p > 0) or isinstance(layer, _BatchNorm):
            what = f"{name or 'the net'} is {type(layer).__name__}"
            raise TypeError(f"{what}; its outputs for one observation would differ in actors and learner")
    fixed = [key for key, value in net.state_dict().items() if not value.is_floating_point()]
    if fixed:
        raise TypeError(f"{fixed[0]} is not floating-point; layers that count batches cannot be shared with actors")
    dtype = torch.uint8 if net.norm.image else torch.float32
    outputs, values = net.body(net.norm.convert(torch.zeros(3, *(obs_space.shape or ()), dtype=dtype)))
    wanted = (3, net.head.num_outputs), (3,)
    if (tuple(outputs.shape), tuple(values.shape)) != wanted:
        given = f"{tuple(outputs.shape)} and {tuple(values.shape)}"
        raise ValueError(f"for 3 observations it returned shapes {given}, must be {wanted[0]} and {wanted[1]}")
