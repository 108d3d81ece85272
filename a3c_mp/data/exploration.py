"""Temporally extended exploration: some environments repeat a random action for a while (Dabney et al. 2021)."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from a3c_mp.nets.distributions import MASKED

STRETCH = 1_000  # steps for which bursts are drawn at once, at least
FREQUENCY = 1 / 60  # probability that a burst begins, in each step of an environment that is not in one
IMPOSSIBLE = -30.0  # logit, beside 0, of the actions that a burst does not take


class Bursts:
    """Bursts of one repeated random action, which exploring environments take instead of the policy's actions.

    Independent noise in every step averages out: it does not carry a paddle across the screen, so the policy never
    learns what the other side is worth. Dabney et al. 2021, "Temporally-extended epsilon-greedy exploration"; there
    the lengths of bursts have a heavy tail, and every environment has them.

    In a burst, the policy that acts is certain of its action, and a rollout stores its logits as of any other step.
    So PPO's ratio and V-trace's rho are pi(a|s) there: such a sample counts for less than one of the policy's own.

    Args:
        num_envs, explorers: environments (B), and how many of them, the first ones, have bursts.
        longest: steps of a burst, from 1 to this, uniformly. The end of a stretch ends it too, that of a game does not.
        after: steps of the other environments together, since the last reward of any of them, from which on there are
            bursts; 0: there always are.
        sizes: number of choices in each of the D parts of an action.
    """

    def __init__(self, num_envs: int, explorers: int, longest: int, after: int, sizes: Sequence[int]):
        assert sizes, "actions are continuous"
        self.num_envs, self.explorers, self.longest, self.after = num_envs, explorers, longest, after
        self.sizes, self.first_logits = sizes, torch.tensor([0, *sizes[:-1]]).cumsum(0)  # of each part, among all
        self.repeated = torch.empty(0)  # int64 [T, B, D]: the action of each step, -1 where the policy acts

    def wanted(self, steps_since_reward: np.ndarray) -> bool:
        """Whether there are bursts in the next rollout, by the steps [B] since each environment's last reward.

        Without rewards, advantages are the value net's errors alone, and the policy takes a random walk: bursts are
        worth their cost then. Environments that explore do not count: what a burst finds, the policy has not learned.
        """
        others = steps_since_reward[self.explorers :]
        return len(others) * min(int(others.min()), self.after) >= self.after

    def draw(self, seed_of: Callable[[int], int], rollout: int, unroll_length: int) -> None:
        """Draw the bursts of a rollout, given its number and its steps T.

        They are drawn for a stretch of whole rollouts, `STRETCH` steps or more, with the seed `seed_of(stretch)`, and
        this rollout takes its part. So a burst may outlast a rollout, and nothing is carried from one to the next.
        """
        num_rollouts = math.ceil(STRETCH / unroll_length)
        stretch, place = divmod(rollout, num_rollouts)
        rng, steps = np.random.default_rng(seed_of(stretch)), num_rollouts * unroll_length
        repeated = np.full((steps, self.num_envs, len(self.sizes)), -1)
        for env in range(self.explorers):
            t = rng.geometric(FREQUENCY) - 1
            while t < steps:
                end = t + int(rng.integers(1, self.longest, endpoint=True))
                repeated[t:end, env] = rng.integers(self.sizes)
                t = end + rng.geometric(FREQUENCY) - 1
        self.repeated = torch.from_numpy(repeated[place * unroll_length :][:unroll_length])

    def acting_logits(self, t: int, logits: Tensor) -> Tensor:
        """The logits [B, P] of the policy that acts in step t of the rollout; a masked action is not repeated."""
        repeated = self.repeated[t]
        bursting = repeated[:, 0] >= 0
        if not bursting.any():
            return logits
        chosen = repeated.clamp(min=0) + self.first_logits
        masked = logits == MASKED
        certain = torch.full_like(logits, IMPOSSIBLE).scatter(1, chosen, 0.0).masked_fill(masked, MASKED)
        possible = bursting & ~masked.gather(1, chosen).any(dim=1)
        return torch.where(possible[:, None], certain, logits)
