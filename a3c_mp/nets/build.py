"""Which net a run has: the one place that builds actor-critic nets from flags or from the settings of a saved run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium

from a3c_mp.errors import ConfigError
from a3c_mp.nets.actor_critic import ActorCritic, ConvActorCritic, MLPActorCritic, SharedActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.images import is_image
from a3c_mp.nets.layers import a3c_convolutions, nature_convolutions, residual_convolutions
from a3c_mp.nets.own import make_own_net

CONVOLUTIONS = {"a3c": a3c_convolutions, "nature": nature_convolutions, "deep": residual_convolutions}
"""`--net` -> convolutions"""


class NetSpec(NamedTuple):
    """Which net, as the flags of these names say."""

    net: str = "nature"
    lstm: bool = False
    hidden: tuple[int, ...] = (64, 64)
    log_std_init: float = 0.0

    @classmethod
    def of_run(cls, saved: Mapping[str, Any]) -> NetSpec:
        """Read the settings in a run's config.json."""
        found = cls(**{name: saved[name] for name in cls._fields if name in saved})
        return found._replace(hidden=tuple(found.hidden))


DEFAULT_NET = NetSpec()


def make_actor_critic(
    obs_space: gymnasium.Space, action_space: gymnasium.Space, spec: NetSpec = DEFAULT_NET
) -> ActorCritic:
    """Make the actor-critic net for these spaces; actions are one of `distributions.ACTIONS`.

    Raises:
        ConfigError: there is no such net, or it does not fit the observations or the other settings.
    """
    assert obs_space.shape is not None
    shape, head, image = obs_space.shape, ActionHead(action_space, spec.log_std_init), is_image(obs_space)
    name = "nature" if spec.net == "shallow" else spec.net  # its name in older versions
    _check(spec, name, obs_space)
    if ":" in name:
        return make_own_net(name, obs_space, action_space, head)
    if spec.lstm or (image and name != "nature"):
        return SharedActorCritic(shape, head, CONVOLUTIONS[name] if image else None, lstm=spec.lstm)
    return ConvActorCritic(shape, head) if image else MLPActorCritic(shape, head, spec.hidden)


def _check(spec: NetSpec, name: str, obs_space: gymnasium.Space) -> None:
    """Raise ConfigError for settings that contradict each other or the observations."""
    image, own = is_image(obs_space), ":" in name
    if not own and name not in CONVOLUTIONS:
        fix = {"book": "its name is nature now", "paper": "its name is a3c now"}.get(name, "see --help")
        raise ConfigError("net", spec.net, f"must be {', '.join(CONVOLUTIONS)} or module:function", fix)
    if not image and not own and name != "nature":
        why = f"observations are of shape {obs_space.shape}, it needs images (uint8, 36 x 36 or more)"
        raise ConfigError("net", spec.net, why, "leave it out")
    if own and spec.lstm:
        raise ConfigError("lstm", True, f"--net {name} has no place for it", "leave one of them out")
    hidden = " ".join(map(str, spec.hidden))
    if not spec.hidden:
        raise ConfigError("hidden", "", "it needs the units of one layer at least", "for instance --hidden 64 64")
    if min(spec.hidden) < 1:
        raise ConfigError("hidden", hidden, "a layer has 1 or more units")
    if spec.hidden != DEFAULT_NET.hidden and (image or own or spec.lstm):
        why = "it is for vectors, without --lstm or a net of your own; other nets have sizes of their own"
        raise ConfigError("hidden", hidden, why, "leave it out")
