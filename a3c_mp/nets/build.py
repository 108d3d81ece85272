"""The flags of nets; builds actor-critic nets, from flags or the settings of a saved run, and the user's own nets."""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from a3c_mp.errors import STARTED_IN, ConfigError
from a3c_mp.nets.actor_critic import ActorCritic, LayeredActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.layers import CONVOLUTIONS, RESIDUAL, LSTMCore, image_shape, image_torso, mlp, num_features
from a3c_mp.nets.obs_norm import ObsNorm

NETS = *CONVOLUTIONS, *RESIDUAL  # `--net`, besides `module:function`
HIDDEN, SHARED_UNITS, OWN_UNITS = (64, 64), 256, 512
"""of MLPs; of the layer that policy and value share; of each one's own hidden layer on images (`--net nature`)"""


class NetSpec(NamedTuple):
    """The flags that choose a net."""

    net: str = "nature"
    lstm: bool = False
    hidden: tuple[int, ...] = ()  # (): the sizes that the kind of net has by default
    log_std_init: float = 0.0
    mean_limit: float = 3.0
    num_quantiles: int = 1  # of action values, in chapters 3 and 7

    @classmethod
    def of_run(cls, saved: Mapping[str, Any]) -> Self:
        """From the settings in a run's config.json."""
        found = cls(**{name: saved[name] for name in cls._fields if name in saved})
        return found._replace(hidden=tuple(map(int, found.hidden)))


DEFAULT_NET = NetSpec()


def make_actor_critic(
    obs_space: gymnasium.Space, action_space: gymnasium.Space, spec: NetSpec = DEFAULT_NET
) -> ActorCritic:
    """Make the actor-critic net for these spaces; actions are one of `distributions.ACTIONS`.

    Policy and value have hidden layers of their own: on images behind the convolutions of Mnih et al. 2015 (after
    Lapan, "Deep Reinforcement Learning Hands-On", chapter 13), on vectors from the input on. They share all but the
    last layer in the nets of A3C and IMPALA (Mnih et al. 2016, section 5.1; Espeholt et al. 2018, figure 3), and with
    an LSTM. Raises ConfigError if there is no such net, or it does not fit the observations or the other settings.
    """
    shape, image = obs_space.shape, image_shape(obs_space)
    head = ActionHead(action_space, spec.log_std_init, spec.mean_limit)
    assert shape is not None
    check_net(spec, shape, image is not None)
    if spec.hidden not in ((), HIDDEN) and (image or ":" in spec.net or spec.lstm):
        why = "it is for vectors, without --lstm or a net of your own; other nets have sizes of their own"
        raise ConfigError("hidden", " ".join(map(str, spec.hidden)), why, "leave it out")
    if ":" in spec.net:
        shapes = (3, head.num_outputs), (3,)
        return make_own_net(spec.net, obs_space, action_space, lambda *parts: OwnActorCritic(head, *parts), shapes)
    norm, core = ObsNorm(shape, image), None
    torso = image_torso(spec.net, shape, image) if image else nn.Flatten()
    features = num_features(torso, shape)
    if spec.lstm or (image and spec.net != "nature"):
        torso = nn.Sequential(torso, nn.Linear(features, SHARED_UNITS), nn.ReLU())
        core = LSTMCore(SHARED_UNITS, SHARED_UNITS) if spec.lstm else None
        sizes: list[int] = [SHARED_UNITS]
    else:
        sizes = [features, OWN_UNITS] if image else [features, *(spec.hidden or HIDDEN)]
    activation = nn.ReLU if image else nn.Tanh
    policy, value = mlp([*sizes, head.num_outputs], activation), mlp([*sizes, 1], activation)
    return LayeredActorCritic(norm, head, torso, core, policy, value)


def check_net(spec: NetSpec, shape: tuple[int, ...], image: bool) -> None:
    """Raise ConfigError for settings that contradict each other or the observations."""
    if ":" not in spec.net and spec.net not in NETS:
        fix = {"book": "its name is nature now", "paper": "its name is a3c now"}.get(spec.net, "see --help")
        raise ConfigError("net", spec.net, f"must be {', '.join(NETS)} or module:function", fix)
    if not image and ":" not in spec.net and spec.net != "nature":
        why = f"observations are of shape {shape}, it needs images (36 x 36 or more)"
        raise ConfigError("net", spec.net, why, "leave it out")
    if ":" in spec.net and spec.lstm:
        raise ConfigError("lstm", True, f"--net {spec.net} has no place for it", "leave one of them out")
    if min(spec.hidden, default=1) < 1:
        raise ConfigError("hidden", " ".join(map(str, spec.hidden)), "a layer needs 1 or more units", "see --help")


class OwnActorCritic(ActorCritic):
    """Actor-critic around a module of the user's own.

    `body`: normalized observations [B, *obs_shape] -> (policy outputs [B, `head.num_outputs`], values [B]).
    """

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
        from a3c_mp.errors.describe import describe, is_missing

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
