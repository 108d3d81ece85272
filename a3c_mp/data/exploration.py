"""Temporally extended exploration: some environments repeat a random action for a while (Dabney et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from a3c_mp.nets.distributions import MASKED, is_masked

FREQUENCY = 1 / 60
"""probability that a burst begins, in each step of an environment that is not in one"""
IMPOSSIBLE = -30.0
"""logit, beside 0, of the actions that a burst does not take"""


class Bursts:
    """Bursts of one repeated random action, which exploring environments take instead of the policy's actions.

    Independent noise in every step averages out: it does not carry a paddle across the screen, so the policy never
    learns what the other side is worth. Dabney et al. 2021, "Temporally-extended epsilon-greedy exploration".

    In a burst, the policy that acts is certain of its action, and a rollout stores its logits as of any other step.
    So PPO's ratio and V-trace's rho are pi(a|s) there: such a sample counts for less than one of the policy's own.

    Args:
        explores: bool [B], the environments that have bursts.
        longest: steps of a burst, from 1 to this, uniformly. The end of a rollout ends it too.
        sizes: number of choices in each part of an action.
    """

    def __init__(self, explores: np.ndarray, longest: int, sizes: Sequence[int]):
        self.explores, self.longest, self.sizes = explores, longest, sizes
        self.first_logits = torch.tensor([0, *sizes[:-1]]).cumsum(0)  # of each part, among all logits
        self.held = torch.empty(0)

    def draw(self, seed: int, unroll_length: int) -> None:
        """Draw the bursts of the next rollout: the action of each step, or -1 where the policy acts."""
        rng = np.random.default_rng(seed)
        held = np.full((unroll_length, len(self.explores), len(self.sizes)), -1)
        for env in np.flatnonzero(self.explores):
            t = rng.geometric(FREQUENCY) - 1
            while t < unroll_length:
                end = t + int(rng.integers(1, self.longest, endpoint=True))
                held[t:end, env] = rng.integers(self.sizes)
                t = end + rng.geometric(FREQUENCY)
        self.held = torch.from_numpy(held)

    def apply(self, t: int, logits: Tensor) -> Tensor:
        """Return the logits [B, P] of the policy that acts in step t; an action that is masked is not repeated."""
        held = self.held[t]
        bursting = held[:, 0] >= 0
        if not bursting.any():
            return logits
        chosen = (held.clamp(min=0) + self.first_logits).to(logits.device)
        masked = is_masked(logits)
        certain = torch.full_like(logits, IMPOSSIBLE).scatter(1, chosen, 0.0).masked_fill(masked, MASKED)
        possible = bursting.to(logits.device) & ~masked.gather(1, chosen).any(dim=1)
        return torch.where(possible[:, None], certain, logits)
