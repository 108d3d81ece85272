"""The flags of nets; builds actor-critic nets, from flags or the settings of a saved run."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import gymnasium
from torch import nn

from a3c_mp.errors import ConfigError
from a3c_mp.nets.actor_critic import ActorCritic, LayeredActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.layers import CONVOLUTIONS, RESIDUAL, LSTMCore, image_shape, image_torso, num_features
from a3c_mp.nets.obs_norm import ObsNorm

NETS = *CONVOLUTIONS, *RESIDUAL  # `--net`, besides `module:function`
HIDDEN, SHARED_UNITS, OWN_UNITS = (64, 64), 256, 512  # of MLPs; on images, of the common layer, and each head's


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
        from a3c_mp.nets.own import OwnActorCritic, make_own_net  # here, as most runs have none

        shapes = (3, head.num_outputs), (3,)
        return make_own_net(spec.net, obs_space, action_space, lambda *parts: OwnActorCritic(head, *parts), shapes)
    torso = image_torso(spec.net, shape, image) if image else nn.Flatten()
    hidden = (OWN_UNITS,) if image else spec.hidden or HIDDEN
    if spec.lstm or (image and spec.net != "nature"):
        torso = nn.Sequential(torso, nn.Linear(num_features(torso, shape), SHARED_UNITS), nn.ReLU())
        hidden = ()
    core = LSTMCore(SHARED_UNITS, SHARED_UNITS) if spec.lstm else None
    return LayeredActorCritic(ObsNorm(shape, image), head, torso, hidden, nn.ReLU if image else nn.Tanh, core)


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
