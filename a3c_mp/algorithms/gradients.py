"""Gradients on their way from actors to the learner: one flat float32 vector for all parameters of a net."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from a3c_mp.data.episodes import Episode
from a3c_mp.nets.obs_norm import Moments
from a3c_mp.processes.slots import Spec
from a3c_mp.run.guard import BAD_IN_A_ROW, FiniteGuard
from a3c_mp.run.run import Run


class Gradient(NamedTuple):
    """What an actor hands over for one batch of samples. In a slot these are views of shared memory."""

    vector: Tensor  # [P] float32, gradient of the batch's mean loss, laid out as `views_like` does
    obs_num: Tensor  # [] float32, with the next two the `Moments` of observations; 0 where there are none to tell of
    obs_mean: Tensor  # [1, *obs_shape] float32
    obs_variance: Tensor  # [1, *obs_shape] float32
    episodes: Tensor  # [M, 3] float64, `Episode`s that have finished, in the first rows

    @property
    def moments(self) -> Moments:
        return Moments(self.obs_num, self.obs_mean, self.obs_variance)


class Report(NamedTuple):
    """The message that goes with a slot: a few hundred bytes, however large the net."""

    version: int  # of the weights that the gradient was taken at
    steps: int  # samples in it
    num_episodes: int  # filled rows of `Gradient.episodes`
    clipped: int  # values that entered `Gradient.moments` clipped
    finite: bool  # whether the gradient and the metrics are, and the rollout behind them
    metrics: dict[str, float]  # means over the batch, for TensorBoard


def gradient_spec(net: nn.Module, obs_shape: Sequence[int], max_episodes: int) -> Spec:
    """Shapes and dtypes of a `Gradient`, for `Slots`."""
    return {
        "vector": ((sum(p.numel() for p in net.parameters()),), torch.float32),
        "obs_num": ((), torch.float32),
        "obs_mean": ((1, *obs_shape), torch.float32),
        "obs_variance": ((1, *obs_shape), torch.float32),
        "episodes": ((max_episodes, len(Episode._fields)), torch.float64),
    }


def views_like(vector: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive parts of a vector, each of the shape and the strides of one of `tensors` (dense ones).

    With the strides too, copies are straight, and fused optimizers, which walk gradient and parameter side by side
    through memory, meet what belongs together.
    """
    tensors = list(tensors)
    parts = vector.split([t.numel() for t in tensors])
    return [part.as_strided(t.shape, t.stride()) for part, t in zip(parts, tensors, strict=True)]


def write_gradient(
    gradient: Gradient, net: nn.Module, moments: Moments | None, episodes: Sequence[Episode], metrics: dict[str, Tensor]
) -> tuple[bool, dict[str, float]]:
    """Fill a slot with the gradient that `backward` left in `net`, and with news of the rollout it comes from.

    Returns:
        (`Report.finite`, `Report.metrics`); reading them back also waits for the GPU, so the slot may be sent.
    """
    parameters = list(net.parameters())
    torch._foreach_copy_(views_like(gradient.vector, parameters), [p.grad for p in parameters if p.grad is not None])
    gradient.obs_num.zero_()
    if moments is not None:
        for field, value in zip(gradient.moments, moments, strict=True):
            field.copy_(value)
    gradient.episodes[: len(episodes)] = torch.tensor(episodes, dtype=torch.float64).reshape(-1, len(Episode._fields))
    means = [value.detach().float().mean() for value in metrics.values()]
    *figures, total = torch.stack([*means, gradient.vector.sum()]).tolist()
    return all(map(math.isfinite, [total, *figures])), dict(zip(metrics, figures, strict=True))


def episodes_of(gradient: Gradient, num_episodes: int) -> list[Episode]:
    """The finished episodes that came with a gradient."""
    rows = gradient.episodes[:num_episodes].tolist()
    return [Episode(episode_return, int(length), int(env)) for episode_return, length, env in rows]


class GradientFilter:
    """Keeps out of the mean what is too old or not finite, and counts it in the run's summary and metrics.

    Args:
        run: the run that counts.
        max_lag: oldest age that passes, in updates; None for any.
        grads_per_rollout: how many a bad rollout spoils.
    """

    def __init__(self, run: Run, max_lag: int | None, grads_per_rollout: int = 1):
        self.run, self.max_lag = run, max_lag
        self.guard = FiniteGuard(run, "grads_not_finite", in_a_row=BAD_IN_A_ROW * grads_per_rollout)
        run.counters.update(grads_too_old=0)  # adds: there from the start, kept on resume

    def check(self, report: Report, worker: int, lag: int) -> bool:
        """Whether a gradient goes into the mean; the actor of one that is not finite is named in the log.

        Raises:
            TrainingError: several of one actor in a row were not finite; the weights have taken in none of them.
        """
        what = f"gradient of actor {worker} at weights {report.version}"
        if not self.guard.check(report.finite, f"actor {worker}", what):
            return False
        if self.max_lag is not None and lag > self.max_lag:
            self.run.counters["grads_too_old"] += 1
            return False
        return True


class MeanGradient:
    """The mean of gradients added one by one, kept where the optimizer looks for it: in `.grad` of the parameters.

    Args:
        net: whose gradients they are; `zero_grad` must not be called on it.
    """

    def __init__(self, net: nn.Module):
        parameters = list(net.parameters())
        self.vector = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.count = 0
        for parameter, view in zip(parameters, views_like(self.vector, parameters), strict=True):
            parameter.grad = view

    def add(self, vector: Tensor) -> None:
        """Take in a gradient [P]; when this returns its memory may be overwritten."""
        if self.count == 0:
            self.vector.copy_(vector)
        else:
            self.vector.add_(vector)
        self.count += 1
        if vector.is_cuda:
            torch.cuda.current_stream(vector.device).synchronize()

    def finish(self, max_norm: float) -> Tensor:
        """Divide the sum by the count and clip it to a norm, in one pass; the next `add` begins a new mean.

        Returns:
            norm of the mean before clipping.
        """
        norm = self.vector.norm() / self.count
        self.vector.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0) / self.count)
        self.count = 0
        return norm
