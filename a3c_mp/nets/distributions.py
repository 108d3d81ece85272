"""Distributions of actions: log-probability, entropy, samples and mode, from the parameters that a net outputs.

A rollout stores the parameters, [..., P], of the policy that acted: logits, or means and log deviations.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from a3c_mp.wrappers import ACTIONS, ActionScaling, num_choices

MASKED = -1e30  # logit of a forbidden action: its probability is exactly 0, and every term of a loss stays finite
LOWEST_ALLOWED = -1e29  # lowest logit of allowed ones beside them: a net that diverges must not prefer forbidden ones


def mask_logits(logits: Tensor, mask: np.ndarray | None) -> Tensor:
    """Logits [B, P], `MASKED` where a mask, bool [B, P], is false; None masks nothing."""
    if mask is None:
        return logits
    return logits.clamp(min=LOWEST_ALLOWED).masked_fill(~torch.from_numpy(mask).to(logits.device), MASKED)


@dataclass(frozen=True, eq=False)
class Categorical:
    """Softmax policy over A actions: logits [..., A]; actions int64, log pi(a|s) and entropy (nats) are [...]."""

    logits: Tensor

    @cached_property
    def log_probs(self) -> Tensor:
        """Log pi(.|s) [..., A], which a loss needs twice; without gradient if first computed under `no_grad`."""
        return F.log_softmax(self.logits, dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        assert action.shape == self.logits.shape[:-1], (action.shape, self.logits.shape)
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(dim=-1)

    def sample(self, rng: torch.Generator) -> Tensor:
        """Sample actions for logits [B, A]; NaN or inf give arbitrary allowed ones, not learned from (`is_finite`)."""
        probabilities = self.logits.nan_to_num().softmax(dim=-1)  # NaN counts as 0, infinities as the largest numbers
        return torch.multinomial(probabilities, 1, generator=rng).squeeze(-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(dim=-1)


class MultiCategorical(NamedTuple):
    """Product of independent softmax policies, whose log-probabilities and entropies add up; else as `Categorical`."""

    logits: Tensor  # [..., sum of sizes]
    shape: tuple[int, ...]  # of an action, int64
    sizes: list[int]

    @property
    def parts(self) -> list[Categorical]:
        return [Categorical(logits) for logits in self.logits.split(self.sizes, dim=-1)]

    def log_prob(self, action: Tensor) -> Tensor:
        chosen = action.flatten(-len(self.shape)).unbind(dim=-1)
        return torch.stack([part.log_prob(a) for part, a in zip(self.parts, chosen, strict=True)]).sum(dim=0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(dim=0)

    def sample(self, rng: torch.Generator) -> Tensor:
        return self._joined([part.sample(rng) for part in self.parts])

    def mode(self) -> Tensor:
        return self._joined([part.mode() for part in self.parts])

    def _joined(self, chosen: list[Tensor]) -> Tensor:
        return torch.stack(chosen, dim=-1).unflatten(-1, self.shape)


class DiagonalGaussian(NamedTuple):
    """Gaussian policy with independent dimensions: params [..., 2 * D] (means, log deviations), actions [..., *shape].

    Actions are unbounded: only the environment gets them clipped, in the units of the space (see `ActionScaling`).
    `log_prob` is that of the density, and the differential entropy can be negative.
    """

    mean: Tensor
    log_std: Tensor
    shape: tuple[int, ...]

    def log_prob(self, action: Tensor) -> Tensor:
        distance = (action.reshape(self.mean.shape) - self.mean) / self.log_std.exp()
        return -(0.5 * distance.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)

    def sample(self, rng: torch.Generator) -> Tensor:
        """Sample actions; parameters with NaN or inf give arbitrary finite ones, as in `Categorical`."""
        noise = torch.randn(self.mean.shape, generator=rng, device=rng.device)
        return self._shaped(self.mean + self.log_std.exp() * noise)

    def mode(self) -> Tensor:
        return self._shaped(self.mean)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.nan_to_num().reshape(*flat.shape[:-1], *self.shape)


Distribution = Categorical | MultiCategorical | DiagonalGaussian


def num_outputs(space: gymnasium.Space) -> int:
    """How many outputs a policy needs: a logit for each choice, or the mean of each dimension."""
    return int(num_choices(space).sum()) or int(np.prod(space.shape or ()))


def num_params(space: gymnasium.Space) -> int:
    """Number of parameters of a distribution (P): the outputs, and a log deviation for each mean."""
    return num_outputs(space) * (2 if isinstance(space, Box) else 1)


def is_valid(space: gymnasium.Space, actions: Tensor) -> bool:
    """Whether actions [..., *shape] are among the choices of a space; continuous ones may lie outside, but not NaN."""
    if isinstance(space, Box):
        return bool(actions.isfinite().all())
    return bool(((actions >= 0) & (actions < torch.from_numpy(num_choices(space)).view(space.shape or ()))).all())


class ActionHead(nn.Module):
    """Head of a policy: outputs of its last layer -> parameters of the distribution over actions of a space.

    For continuous actions it has a log deviation for each dimension, which does not depend on the observation and is
    `log_std_init` at first. Means of bounded dimensions (`ActionScaling`) stay within +-`mean_limit`: far outside, all
    actions are clipped to the same one, so that rewards do not tell good means from bad ones. Raises ValueError for a
    space that is not one of `ACTIONS`, with choices from 0 on.
    """

    bounded: Tensor  # bool [D]

    def __init__(self, space: gymnasium.Space, log_std_init: float = 0.0, mean_limit: float = 3.0):
        super().__init__()
        if not isinstance(space, ACTIONS) or np.any(getattr(space, "start", 0)):
            raise ValueError(f"there is no policy for actions {space}; discrete ones must start from 0")
        self.space, self.num_outputs, self.mean_limit = space, num_outputs(space), mean_limit
        self.sizes = num_choices(space).tolist()  # of each choice; none for continuous actions
        if isinstance(space, Box):
            self.log_std = nn.Parameter(torch.full((self.num_outputs,), log_std_init))
            bounded = torch.from_numpy(ActionScaling(space).is_bounded.flatten())
            self.register_buffer("bounded", bounded, persistent=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """outputs [..., num_outputs] -> parameters [..., P]."""
        if not isinstance(self.space, Box):
            return outputs
        means = torch.where(self.bounded, self.mean_limit * (outputs / self.mean_limit).tanh(), outputs)
        return torch.cat([means, self.log_std.to(outputs.dtype).expand_as(outputs)], dim=-1)

    def distribution(self, params: Tensor) -> Distribution:
        """The distribution with parameters [..., P]; its actions have the shape [..., *space.shape]."""
        if isinstance(self.space, Discrete):
            return Categorical(params)
        shape = self.space.shape or ()
        if self.sizes:
            return MultiCategorical(params, shape, self.sizes)
        mean, log_std = params.chunk(2, dim=-1)
        return DiagonalGaussian(mean, log_std, shape)
