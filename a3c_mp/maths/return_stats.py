"""Mean and standard deviation of discounted returns, from rewards as they come: on their scale, rewards are learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReturnStats:
    """Mean and deviation of the discounted returns of all states so far, exact whenever their games have ended.

    A reward adds to the returns of all earlier states of its game. What that adds to the sum of the returns and to the
    sum of their squares depends on three sums over these states, which `open` has for the game in each environment:
    of gamma^k, of gamma^(2 k) and of gamma^k G, where k is a state's distance from the next reward, and G its return
    so far. So it does not matter how short the rollouts are, and nothing is bootstrapped.
    """

    def __init__(self, gamma: float, num_actors: int, num_envs: int):
        self.gamma = gamma
        self.sums = torch.zeros(3, dtype=torch.float64)  # number of states, sum of returns, sum of squared returns
        self.open = torch.zeros(num_actors, 3, num_envs, dtype=torch.float64)

    def update(self, actor: int, rewards: Tensor, done: Tensor) -> None:
        """Add the next steps of an actor: rewards [T, B], `done` bool [T, B] where games end.

        Steps with NaN or inf are left out, all of them.
        """
        rewards, going_on = rewards.double(), (~done).double()
        if not rewards.isfinite().all():
            return
        later, partial = torch.zeros_like(rewards[0]), []
        for reward, discount in zip(rewards.flip(0).unbind(), (self.gamma * going_on).flip(0).unbind(), strict=True):
            partial.append(later := torch.addcmul(reward, discount, later))
        returns = torch.stack(partial).flip(0)  # of the rewards in these steps
        weights, squares, weighted = self.open[actor]
        first, first_square = returns[0], returns[0].square()
        more = torch.stack([weights * first, 2 * weighted * first + squares * first_square]).sum(1)
        self.sums += torch.stack([torch.tensor(float(returns.numel())), returns.sum(), returns.square().sum()])
        self.sums[1:] += more
        decay = self.gamma ** torch.arange(len(rewards), 0, -1).double()[:, None]  # from each step to the next rewards
        in_game = going_on.flip(0).cumprod(0).flip(0)  # states whose game goes on after these steps
        new, old = decay * in_game, decay[0] * in_game[0]
        weights, squares, weighted = old * weights, old.square() * squares, old * (weighted + squares * first)
        self.open[actor] = torch.stack([weights, squares, weighted])
        self.open[actor] += torch.stack([new, new.square(), new * returns]).sum(1)

    def deviation(self) -> float:
        """The standard deviation, 1 where all returns are equal."""
        count, total, squares = self.sums.tolist()
        mean = total / max(count, 1)
        variance = squares / max(count, 1) - mean**2
        return variance**0.5 if variance > 1e-12 * mean**2 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "open": self.open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; games that are open in it are left out where there are other actors now."""
        self.sums.copy_(state["sums"])
        if state["open"].shape == self.open.shape:
            self.open.copy_(state["open"])
