"""Gradient messages from actors to the learner: one flat float32 vector for all parameters of a net."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a3c_mp.algorithms.actor_critic import obs_for_stats
from a3c_mp.data.episodes import Episode
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite
from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics, with_diagnostics
from a3c_mp.nets.obs_norm import Moments, ObsNorm
from a3c_mp.processes.slots import Spec
from a3c_mp.run.guard import BAD_IN_A_ROW, NonFiniteFilter
from a3c_mp.run.progress import RunState


class Report(NamedTuple):
    """Metadata of a gradient, sent with its slot: a few hundred bytes for a net of any size."""

    version: int  # of the weights that the gradient was computed at
    steps: int  # samples in it
    num_episodes: int  # filled rows of `Gradient.episodes`
    clipped: int  # values that entered `Gradient.moments` clipped
    finite: bool  # whether gradient, metrics and rollout have no NaN or inf
    metrics: dict[str, float]  # means over the batch, for TensorBoard


class RolloutStats(NamedTuple):
    """Statistics of a rollout that the learner counts; sent with the first of its gradients."""

    episodes: list[Episode]  # that ended in it
    moments: Moments | None  # of its observations
    clipped: int  # values that entered the moments clipped
    finite: bool  # whether the rollout has no NaN or inf in what is learned from

    @classmethod
    def of(cls, rollout: Rollout, norm: ObsNorm | None) -> RolloutStats:
        """Compute the statistics of a rollout; moments of its observations only if there is a `norm` to clip them."""
        moments, clipped = None, 0
        if norm is not None:  # float32 where it clips, like the learner's
            obs = obs_for_stats(rollout.obs, norm.image).to(norm.mean.device, non_blocking=True)
            moments, clipped = norm.clipped_moments(obs)
        return cls(finished_episodes(rollout), moments, clipped, is_finite(rollout))

    def once_sent(self) -> RolloutStats:
        """Return the statistics for the rollout's other gradients: empty, so that nothing is counted twice."""
        return RolloutStats([], None, 0, self.finite)


class Gradient(NamedTuple):
    """The gradient of one batch, in a slot. The fields are views of shared memory."""

    vector: Tensor  # [P] float32, gradient of the batch's mean loss, laid out as in `views_like`
    obs_num: Tensor  # [] float32, 0 without moments; with the next two fields the `Moments` of observations
    obs_mean: Tensor  # [1, *obs_shape] float32
    obs_variance: Tensor  # [1, *obs_shape] float32
    episodes: Tensor  # [M, 3] float64, finished `Episode`s in the first rows

    @property
    def moments(self) -> Moments:
        return Moments(self.obs_num, self.obs_mean, self.obs_variance)

    def write_stats(self, stats: RolloutStats) -> None:
        """Write the observation moments and the finished episodes of a rollout."""
        self.obs_num.zero_()
        if stats.moments is not None:
            for field, value in zip(self.moments, stats.moments, strict=True):
                field.copy_(value)
        rows = torch.tensor(stats.episodes, dtype=torch.float64).reshape(-1, len(Episode._fields))
        self.episodes[: len(rows)] = rows

    def finished_episodes(self, report: Report) -> list[Episode]:
        """Return the finished episodes that came with the gradient."""
        rows = self.episodes[: report.num_episodes].tolist()
        return [Episode(episode_return, int(length), int(env)) for episode_return, length, env in rows]

    def report(self, version: int, steps: int, stats: RolloutStats, metrics: Metrics) -> Report:
        """Return the metadata of a filled slot. Reading the means waits for the GPU, so the slot is complete then."""
        found = with_diagnostics(metrics)
        means = [torch.as_tensor(value).detach().float().mean() for value in found.values()]
        *figures, total = torch.stack([*means, self.vector.sum()]).tolist()
        named = dict(zip(found, figures, strict=True))
        own = [named[name] for name in metrics if name in named]  # no explained variance: it can overflow
        finite = stats.finite and all(math.isfinite(value) for value in (total, *own))
        return Report(version, steps, len(stats.episodes), stats.clipped, finite, named)


def settle_sync(args: Any) -> Any:  # of the chapter's own class
    """Return the settings with those that --sync implies. Raises ConfigError for what they rule out."""
    if not (args.sync or args.deterministic):
        return args
    if args.grads_per_step not in (1, args.num_actors):
        why = f"with --sync or --deterministic a step takes one gradient of each of {args.num_actors} actors"
        raise ConfigError("grads-per-step", args.grads_per_step, why, "leave it out")
    why = "with --sync or --deterministic each actor waits for the new weights"
    if args.slots_per_actor > 1:
        raise ConfigError("slots-per-actor", args.slots_per_actor, why, "leave it out")
    if args.max_lag is not None and args.resume is None:  # older versions accepted it
        raise ConfigError("max-lag", args.max_lag, why, "leave it out")
    return replace(args, sync=True)


def gradient_spec(net: nn.Module, obs_shape: Sequence[int], max_episodes: int) -> Spec:
    """Return shapes and dtypes of a `Gradient`, for `Slots`."""
    return {
        "vector": ((sum(p.numel() for p in net.parameters()),), torch.float32),
        "obs_num": ((), torch.float32),
        "obs_mean": ((1, *obs_shape), torch.float32),
        "obs_variance": ((1, *obs_shape), torch.float32),
        "episodes": ((max_episodes, len(Episode._fields)), torch.float64),
    }


def views_like(vector: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Split a flat vector into views, each with the shape and strides of one of `tensors` (dense ones).

    With equal strides, copies are contiguous, and a fused optimizer, which reads gradient and parameter in the order of
    memory, pairs the right elements.
    """
    tensors = list(tensors)
    parts = vector.split([t.numel() for t in tensors])
    return [part.as_strided(t.shape, t.stride()) for part, t in zip(parts, tensors, strict=True)]


def copy_gradient(net: nn.Module, vector: Tensor) -> None:
    """Copy the gradient that `backward` left in `net` into a flat vector [P]; that of an unused parameter is 0."""
    parameters = list(net.parameters())
    views, gradients = [], []
    for view, parameter in zip(views_like(vector, parameters), parameters, strict=True):
        if parameter.grad is None:
            view.zero_()
        else:
            views.append(view)
            gradients.append(parameter.grad)
    torch._foreach_copy_(views, gradients)


def unsent(batches: Iterable[Tensor], stats: RolloutStats, num_sent: int) -> Iterator[tuple[Tensor, RolloutStats]]:
    """Yield the batches of a rollout whose gradients have not been sent, each with the statistics to send with it.

    Args:
        batches: indices of samples.
        stats: of the rollout; they go with its first gradient.
        num_sent: gradients that a predecessor of this actor has sent.
    """
    for number, indices in enumerate(batches):
        if number >= num_sent:
            yield indices, stats.once_sent() if number else stats


class GradientFilter:
    """Filter for gradients that are too old (policy lag) or contain NaN or inf; counts those that it drops.

    Args:
        run: its counters, in summary and metrics, and its log are used.
        max_lag: largest policy lag that passes (updates); None for no limit.
        grads_per_rollout: gradients of one rollout; one bad rollout spoils all of them.
    """

    def __init__(self, run: RunState, max_lag: int | None, grads_per_rollout: int = 1):
        self.run, self.max_lag = run, max_lag
        self.guard = NonFiniteFilter(run, "grads_not_finite", in_a_row=BAD_IN_A_ROW * grads_per_rollout)
        run.counters.update(grads_too_old=0)  # adds: there from the start, kept on resume

    def check(self, report: Report, worker: int, lag: int) -> bool:
        """Whether a gradient goes into the mean; one with NaN or inf is logged with the name of its actor.

        Raises:
            TrainingError: several of one actor in a row were not finite; none of them was applied to the weights.
        """
        what = f"gradient of actor {worker} at weights {report.version}"
        if not self.guard.check(report.finite, f"actor {worker}", what):
            return False
        if self.max_lag is not None and lag > self.max_lag:
            self.run.counters["grads_too_old"] += 1
            return False
        return True


class MeanGradient:
    """Mean of gradients that are added one by one, in `.grad` of the parameters, where the optimizer reads it.

    Args:
        net: has the parameters; do not call `zero_grad` on it.
    """

    def __init__(self, net: nn.Module):
        parameters = list(net.parameters())
        self.vector = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.count = 0
        for parameter, view in zip(parameters, views_like(self.vector, parameters), strict=True):
            parameter.grad = view

    def add(self, vector: Tensor) -> None:
        """Add a gradient [P]; its memory may be overwritten as soon as this returns."""
        if self.count == 0:
            self.vector.copy_(vector)
        else:
            self.vector.add_(vector)
        self.count += 1
        if vector.is_cuda:
            torch.cuda.current_stream(vector.device).synchronize()

    def finish(self, max_norm: float) -> Tensor:
        """Divide the sum by the count and clip its norm, in one pass; the next `add` starts a new mean.

        Returns:
            norm of the mean before clipping.
        """
        norm = self.vector.norm() / self.count
        self.vector.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0) / self.count)
        self.count = 0
        return norm
