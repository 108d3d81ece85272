"""The scale of rewards: they are divided by the standard deviation of the discounted returns so far."""

from typing import Any

import torch
from torch import Tensor

LARGEST_REWARD = 10.0
"""absolute reward that scaling ends at: where hardly any state has a return, their deviation says nothing"""

MANY, OUTLIER = 10_000, 10.0
"""states after which a reward counts as so many times the largest one before, if it is larger: a reward of 1e9 that a
simulator gives once would leave the others too small to learn from, and ten-fold steps soon reach lasting ones"""

FEW = 1_000  # states that returns of another kind count for at most


class ReturnStats:
    """Mean and deviation of the discounted returns of all states so far, exact whenever their games have ended.

    A reward adds to the returns of all earlier states of its game. What that adds to the sum of the returns and to the
    sum of their squares depends on three sums over these states, which `open` has for the game in each environment:
    of gamma^k, of gamma^(2 k) and of gamma^k G, where k is a state's distance from the next reward, and G its return
    so far. So it does not matter how short the rollouts are, and nothing is bootstrapped.
    """

    def __init__(self, gamma: float, num_actors: int, num_envs: int, is_clipped: bool = False):
        self.gamma, self.is_clipped = gamma, is_clipped  # whether rewards are clipped: others make other returns
        self.sums = torch.zeros(3, dtype=torch.float64)  # number of states, sum of returns, sum of squared returns
        self.largest = torch.zeros((), dtype=torch.float64)  # absolute reward
        self.open = torch.zeros(num_actors, 3, num_envs, dtype=torch.float64)

    def update(self, actor: int, rewards: Tensor, done: Tensor) -> None:
        """Add the next steps of an actor: finite raw rewards [T, B], `done` bool [T, B] where games end."""
        rewards, going_on = (rewards.sign() if self.is_clipped else rewards).double(), (~done).double()
        if self.sums[0] > MANY and self.largest > 0:
            rewards = rewards.clamp(-OUTLIER * self.largest, OUTLIER * self.largest)
        self.largest = torch.maximum(self.largest, rewards.abs().max())
        later, partial = torch.zeros_like(rewards[0]), []
        for reward, discount in zip(rewards.flip(0).unbind(), (self.gamma * going_on).flip(0).unbind(), strict=True):
            partial.append(later := torch.addcmul(reward, discount, later))
        returns = torch.stack(partial).flip(0)  # of the rewards in these steps
        discounts, squares, discounted = self.open[actor]
        first, first_square = returns[0], returns[0].square()
        more = torch.stack([discounts * first, 2 * discounted * first + squares * first_square]).sum(1)
        self.sums += torch.stack([torch.tensor(float(returns.numel())), returns.sum(), returns.square().sum()])
        self.sums[1:] += more
        decay = self.gamma ** torch.arange(len(rewards), 0, -1).double()[:, None]  # from each step to the next rewards
        in_game = going_on.flip(0).cumprod(0).flip(0)  # states whose game goes on after these steps
        new, old = decay * in_game, decay[0] * in_game[0]
        carried = [old * discounts, old.square() * squares, old * (discounted + squares * first)]
        self.open[actor] = torch.stack(carried) + torch.stack([new, new.square(), new * returns]).sum(1)

    def forget(self, actor: int) -> None:
        """Leave out what follows in an actor's open games: it plays new ones, or steps of them are missing."""
        self.open[actor] = 0.0

    def deviation(self) -> float:
        """The standard deviation of the returns; 0 where all are equal."""
        count, total, squares = self.sums.tolist()
        mean = total / max(count, 1)
        variance = squares / max(count, 1) - mean * mean
        return variance**0.5 if variance > 1e-12 * mean * mean else 0.0

    def scale(self) -> float:
        """What rewards are multiplied by: 1 / deviation, or less, so that none becomes larger than `LARGEST_REWARD`.

        Where all returns are equal, the largest reward becomes 1.
        """
        largest = self.largest.item()
        return 1 / min(max(self.deviation() or largest or 1.0, largest / LARGEST_REWARD, 1e-30), 1e37)

    def state_dict(self) -> dict[str, Any]:
        own = {"gamma": self.gamma, "is_clipped": self.is_clipped}
        return {"sums": self.sums, "largest": self.largest, "open": self.open, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; games that are open in it are left out where there are other actors now.

        Returns of another discount factor, or of rewards that are clipped now and were not, or the reverse, count as no
        more than `FEW` states, so that those to come soon outweigh them.
        """
        was_clipped = state.get("is_clipped", self.is_clipped)
        is_same = (state.get("gamma", self.gamma), was_clipped) == (self.gamma, self.is_clipped)
        self.sums.copy_(state["sums"] * (1 if is_same else min(1.0, FEW / max(float(state["sums"][0]), 1.0))))
        self.largest.copy_(state["largest"] if was_clipped == self.is_clipped else torch.zeros(()))
        if is_same and state["open"].shape == self.open.shape:
            self.open.copy_(state["open"])
