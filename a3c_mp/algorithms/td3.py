"""TD3 (Fujimoto et al. 2018): DDPG with two critics, smoothed targets and delayed policy updates.

A module of the same functions as `ddpg`. The policy follows the first critic, whose errors are the priorities, too.
"""

from collections import namedtuple
from functools import partial
from typing import Any

import torch
from torch import Tensor

from a3c_mp.algorithms import ddpg
from a3c_mp.algorithms.apex_settings import Args
from a3c_mp.algorithms.ddpg import ACTIONS, Policy, make_optimizer, make_policy, policy_loss, q_values, stored
from a3c_mp.nets.q_values import DDPGNet, TD3Net
from a3c_mp.replay import Batch

NoisyBatch = namedtuple("NoisyBatch", [*Batch._fields, "noise"])  # type: ignore[misc]
"""a `Batch`, and standard normal numbers [N, *action_shape]"""
__all__ = ["ACTIONS", "Policy", "make_optimizer", "make_policy", "policy_loss", "q_values", "stored"]
make_net = partial(ddpg.make_net, net_class=TD3Net)


def with_noise(batch: Batch, rng: torch.Generator) -> Any:
    """A batch with the noise of its targets, drawn here: in a CUDA graph it would not be that of a resumed run."""
    noise = torch.randn(batch.action.shape, generator=rng).to(batch.action.device)
    return NoisyBatch(*batch, noise)  # type: ignore[call-arg]


@torch.no_grad()
def bootstrap_values(args: Args, net: DDPGNet, target_net: DDPGNet, batch: Any) -> Tensor:
    """Return min_i Q_target,i(s', mu_target(s') + noise) [N, 1] float32 (Fujimoto et al. 2018, equations 10 and 14).

    A `NoisyBatch`'s noise is scaled and clipped, so that a value is that of actions around the target policy's; s' is
    m <= n steps later.
    """
    best = target_net(batch.next_obs)[0]
    noise = (args.target_noise * batch.noise).clamp(-args.target_noise_clip, args.target_noise_clip)
    first, second = target_net.qs(batch.next_obs, (best + noise).clamp(-1.0, 1.0))
    return torch.minimum(first, second).float()[:, None]
