"""Nets of the user's own, `--net module:function`: found, put behind normalization, and tried before a run."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from a3c_mp.errors import STARTED_IN, ConfigError, describe, is_missing
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.layers import image_shape
from a3c_mp.nets.obs_norm import ObsNorm


class OwnActorCritic(ActorCritic):
    """Actor-critic around the user's `body`: inputs [B, *obs_shape] -> (outputs [B, head.num_outputs], values [B])."""

    def __init__(self, head: ActionHead, norm: ObsNorm, body: nn.Module):
        super().__init__(norm, head)
        self.body = body

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        outputs, values = self.body(self.norm.convert(obs))
        return self.head(outputs).float(), values.float()


def make_own_net(
    name: str, obs_space: gymnasium.Space, action_space: gymnasium.Space,
    wrap: Callable[[ObsNorm, nn.Module], Any], shapes: tuple[tuple[int, ...], ...],
) -> Any:  # fmt: skip
    """Make the net of `--net module:function`; the current folder is searched last.

    `wrap` puts normalization before the user's module; for three observations that must return tensors of `shapes`.
    Raises ConfigError if there is none, or it breaks the contract.
    """
    (module, _, function), shape = name.partition(":"), obs_space.shape or ()
    if (here := str(STARTED_IN[0] if STARTED_IN else Path.cwd())) not in sys.path:
        sys.path.append(here)
    fix = "must be module:function, in the current folder or installed"
    try:
        make_body = getattr(importlib.import_module(module), function)
        fix = "correct it; docs/nets.md has an example"
        body = make_body(obs_space, action_space)
        if not isinstance(body, nn.Module):
            raise TypeError(f"it returned a {type(body).__name__}, must be a torch.nn.Module")
        net = wrap(ObsNorm(shape, image_shape(obs_space)), body)
        _check_own_net(net, shape, shapes)
    except Exception as error:  # code of the user's own can raise anything
        if module not in sys.modules and not is_missing(error, module):
            fix = "correct it"
        raise ConfigError("net", name, describe(error), fix) from error
    return net


def _check_own_net(net: Any, obs_shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise an error unless the net can be shared with actors and returns outputs of the right shapes."""
    for name, layer in net.body.named_modules():
        if (isinstance(layer, _DropoutNd) and layer.training and layer.p > 0) or isinstance(layer, _BatchNorm):
            what = f"{name or 'the net'} is {type(layer).__name__}"
            raise TypeError(f"{what}; its outputs for one observation would differ in actors and learner")
    if fixed := [key for key, value in net.state_dict().items() if not value.is_floating_point()]:
        raise TypeError(f"{fixed[0]} is not floating-point; layers that count batches cannot be shared with actors")
    obs = torch.zeros(3, *obs_shape, dtype=torch.uint8 if net.norm.image else torch.float32)
    obs[1] = 255 if net.norm.image else 1
    passes, states = [], []
    with torch.no_grad():  # no decorator: it would be the place of the errors below
        net.body(net.norm.convert(obs))  # lazy layers have their sizes then
        state = {key: value.clone() for key, value in net.state_dict().items()}
        for part in (obs, *obs.split(1)):
            for key, value in net.state_dict().items():
                value.copy_(state[key])  # `spectral_norm` changes its buffers in each pass
            passes.append(net.body(net.norm.convert(part)))
            states.append(torch.cat([value.flatten() for value in net.state_dict().values()]))
    together, *alone = (outputs if len(shapes) > 1 else [outputs] for outputs in passes)
    given = tuple(tuple(output.shape) for output in together)
    if given != shapes:
        found, wanted = (" and ".join(map(str, each)) for each in (given, shapes))
        raise ValueError(f"for 3 observations it returned shapes {found}, must be {wanted}")
    for whole, *parts in zip(together, *alone, strict=True):
        most = 0.01 * float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())  # bfloat16 has steps of 0.4%
        apart = torch.cat([part.flatten() for part in parts])
        if not torch.allclose(whole.flatten(), apart, rtol=0.0, atol=most, equal_nan=True):
            raise ValueError("outputs for an observation depend on chance, or on the others of a batch (batch_first?)")
    if not all(torch.allclose(each, states[0], equal_nan=True) for each in states[1:]):
        raise ValueError("its buffers change with the observations of a pass; they would differ in actors and learner")
    if bad := [key for key, value in net.state_dict().items() if not value.isfinite().all()]:
        raise ValueError(f"{bad[0]} has NaN or infinity; register a buffer that is a constant with persistent=False")
