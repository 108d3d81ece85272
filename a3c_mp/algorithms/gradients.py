"""Chapter 2's setup, and its messages from actors to the learner: a net's gradient as one flat float32 vector."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from a3c_mp.algorithms.actor_critic import A3CSetup, action_metrics, obs_for_stats
from a3c_mp.algorithms.actor_critic_settings import A3CArgs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.episodes import Episode, episodes_at
from a3c_mp.data.rollout import Rollout, empty_rollout, is_finite, minibatches, rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics, with_diagnostics
from a3c_mp.maths.return_stats import ReturnStats
from a3c_mp.maths.schedules import set_learning_rate
from a3c_mp.processes.pool import Filled, Token
from a3c_mp.processes.slots import Spec
from a3c_mp.processes.weights import Weights
from a3c_mp.run.learner import Learner, MessageStats
from a3c_mp.run.progress import BAD_IN_A_ROW


class Report(NamedTuple):
    """Metadata of a gradient, sent with its slot: a few hundred bytes for a net of any size."""

    version: int  # of the weights that the gradient was computed at
    steps: int  # samples in it
    num_episodes: int  # filled rows of "episodes" in the slot
    is_first: bool  # of its rollout: it comes with rewards, and observations for the statistics
    finite: bool  # whether gradient, loss and rollout have no NaN or inf
    metrics: dict[str, float]  # means over the batch, for TensorBoard


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
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    torch._foreach_copy_(views_like(vector, parameters), gradients)


# ---- at an actor


class Outbox:
    """An actor's end: which minibatches of a rollout are due, and the slots that the gradients of `net` go to."""

    def __init__(self, args: A3CArgs, collector: RolloutCollector, net: nn.Module):
        self.args, self.collector, self.net, self.memory = args, collector, net, collector.memory
        self.rng, self.num_sent = torch.Generator(), collector.messages  # the latter: by a predecessor
        spaces = collector.env.single_observation_space, collector.action_space
        spec = rollout_spec(args.unroll_length, args.num_envs, *spaces, extra=args.rollout_fields)
        self.rollout = empty_rollout(spec, pin=self.memory.weights.device.type == "cuda")

    def collect(self) -> Rollout:
        """Collect the next rollout with the newest weights."""
        rollout = self.rollout
        self.rng.manual_seed(self.collector.seeds(self.collector.rollouts)[0])  # a successor draws the same minibatches
        version = self.memory.more.load(self.collector.net)
        self.collector.collect(rollout)
        self.episodes = episodes_at(rollout.done, rollout.episode_return, rollout.episode_length)
        self.finite = is_finite(rollout)
        self.reward_scale = float(self.collector.net.reward_scale)
        is_unknown = version == 0 and self.reward_scale == 1.0  # none is published yet
        if self.args.reward_scale is None and is_unknown and self.finite:
            stats = ReturnStats(self.args.gamma, 1, self.args.num_envs, self.args.reward_clip)
            stats.update(0, rollout.reward, rollout.done)  # of this rollout alone, as a successor's are
            self.reward_scale = stats.scale()
        self.is_first = True
        self.action_metrics = action_metrics(self.collector.action_space, rollout)
        return rollout

    def unsent(self, num_samples: int) -> Iterator[Tensor]:
        """Yield the indices of the rollout's minibatches whose gradients have not been sent, int64 [M] each."""
        batches = minibatches(num_samples, self.args.batch_size, self.rng, self.memory.weights.device)
        for number, indices in enumerate(batches):
            if number >= self.num_sent:
                yield indices
            if number == 0:  # what is counted once goes with the first gradient
                self.episodes, self.is_first = [], False
        self.num_sent = 0

    def write(self, token: Token, version: int, metrics: Metrics, steps: int) -> Report:
        """Write the gradient of `steps` samples, which is in `.grad`, into a slot; return what to send with it."""
        slot = self.memory.slots[token.slot]
        copy_gradient(self.net, slot["vector"])
        if is_first := self.is_first:
            if self.args.normalize_obs:
                slot["obs"].copy_(obs_for_stats(self.rollout.obs, self.collector.net.norm.has_images))
            slot["reward"].copy_(self.rollout.reward)
            slot["done"].copy_(self.rollout.done)
        rows = torch.tensor(self.episodes, dtype=torch.float64).reshape(-1, len(Episode._fields))
        slot["episodes"][: len(rows)] = rows
        self.memory.states.write(token.slot, self.collector.state_fields, self.rollout)
        # Reading the means waits for the GPU, so the slot is complete then.
        found = with_diagnostics(metrics) | self.action_metrics
        device = slot["vector"].device  # the rollout's metrics are of the CPU
        means = [torch.as_tensor(value, device=device).detach().float().mean() for value in found.values()]
        *figures, total = torch.stack([*means, slot["vector"].sum()]).tolist()
        named = dict(zip(found, figures, strict=True))
        finite = self.finite and math.isfinite(total + named.get("losses/total", 0.0))
        return Report(version, steps, len(self.episodes), is_first, finite, named)


# ---- at the learner


class GradientSetup(A3CSetup):
    """What chapter 2 makes before a run: net, optimizer, and slots for gradients."""

    slots_with_actors = True

    def __init__(self, args: Any, rank: int = 0):
        each, waits = "a step takes one gradient of each actor", "each actor waits for the new weights"
        for flag, is_refused, why in (
            ("grads-per-step", args.grads_per_step not in (1, args.num_actors), each),
            ("slots-per-actor", args.slots_per_actor > 1, waits),
            ("max-lag", args.max_lag is not None, waits),
        ):
            if args.in_order and is_refused:
                value = getattr(args, flag.replace("-", "_"))
                raise ConfigError(flag, value, f"with --sync or --deterministic {why}", "leave it out")
        gradients = -(-args.unroll_length * args.num_envs // args.batch_size)
        super().__init__(args, rank, messages=gradients)
        self.message, self.bad_in_a_row = "gradient", BAD_IN_A_ROW * gradients  # one bad rollout spoils all of its own
        self.weights_dtype = torch.float32  # actors compute gradients with them

    def slot_spec(self, args: Any, net: Any, obs_space: gymnasium.Space, action_space: gymnasium.Space) -> Spec:
        """Return shapes and dtypes of a slot for the gradient of a batch."""
        spec = super().slot_spec(args, net, obs_space, action_space)
        shape, dtype = spec["obs"]
        obs = obs_for_stats(torch.empty(shape, dtype=dtype, device="meta"), net.norm.has_images)
        return {
            "vector": ((sum(p.numel() for p in net.parameters()),), torch.float32),  # of the batch's mean loss
            "obs": (tuple(obs.shape), dtype),  # those of the rollout that update the observation statistics
            "reward": spec["reward"],  # [T, B], raw
            "done": spec["terminated"],  # [T, B], where games end
            "episodes": ((args.unroll_length * args.num_envs, len(Episode._fields)), torch.float64),  # first rows
        }

    def begin(self, learner: Learner) -> None:
        # With --sync the policy acts with weights of their own, because a rollout has one version.
        self.more = Weights(self.net, device=self.acting.device) if learner.args.in_order else learner.weights
        self.kept = {"acting_weights": self.more}
        learner.run.counters.update(gradients_too_old=0)  # adds: there from the start, kept on resume

    def rounds(self, learner: Learner) -> Iterator[list[Tensor]]:
        """Yield the gradients [P] of a round that are finite and not too old: one, or in order one of every actor."""
        while filled := learner.take():
            set_learning_rate(learner)
            updates = learner.updates
            gradients = [self._accept(learner, message) for message in filled]
            with learner.run.timing("learning"):
                yield [gradient for gradient in gradients if gradient is not None]
            if learner.args.in_order and learner.states.completes_rollout(filled):  # the next rollout begins
                with learner.run.timing("publishing"):
                    self.more.publish(self.net)
            if not learner.end_round(publish=learner.updates > updates):
                return
            learner.release(filled)

    def _accept(self, learner: Learner, message: Filled) -> Tensor | None:
        """Record a gradient and return it, unless it is too old, or contains NaN or inf."""
        slot, report = self.slots[message.slot], message.payload
        lag, max_lag = learner.lag(report.version), learner.args.max_lag
        rows = slot["episodes"][: report.num_episodes].tolist()
        episodes = [Episode(episode_return, int(length), int(env)) for episode_return, length, env in rows]
        rewards = (slot["reward"], slot["done"]) if report.is_first else None
        stats = MessageStats(report.steps, episodes if report.is_first else None, lag, report.finite, rewards)
        if not learner.record([message], [stats]).finite:
            return None
        if max_lag is not None and lag > max_lag:
            learner.run.counters["gradients_too_old"] += 1
            return None
        if report.is_first:
            learner.update_norm(slot["obs"].to(learner.device), f"{learner.args.actor_name} {message.worker}")
        learner.run.record_metrics(report.metrics)
        return slot["vector"]


class MeanGradient:
    """Mean of gradients that are added one by one; `finish` puts it into `.grad` of a net's parameters."""

    def __init__(self, net: nn.Module):
        parameters = list(net.parameters())
        self.vector = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.count = 0
        self.places = list(zip(parameters, views_like(self.vector, parameters), strict=True))

    def add(self, vector: Tensor) -> None:
        """Add a gradient [P]; its memory may be overwritten as soon as this returns."""
        vector = vector.to(self.vector.device)  # actors may act on the CPU
        if self.count == 0:
            self.vector.copy_(vector)
        else:
            self.vector.add_(vector)
        self.count += 1
        if vector.is_cuda:
            torch.cuda.current_stream(vector.device).synchronize()

    def finish(self, max_norm: float) -> Tensor:
        """Divide the sum by the count and clip its norm, in one pass; return the norm of the mean before clipping."""
        for parameter, view in self.places:
            parameter.grad = view if parameter.requires_grad else None
            if parameter.grad is None:  # frozen here, but not in actors
                view.zero_()
        norm = self.vector.norm() / self.count
        self.vector.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0) / self.count)
        self.count = 0
        return norm
