"""Chapter 2. A3C by gradients: actors compute the gradients, the learner averages them and steps.

Each actor process steps a vector of environments, computes the gradient of its own samples at the newest weights, and
writes it into a slot of shared memory as one flat vector. The learner owns the only optimizer: it takes a gradient,
or the mean of several, clips it, steps and publishes new weights. Only gradients and small statistics leave the actor.

    actor 0 --(gradient 0)--> \\
    actor 1 --(gradient 1)-->  learner --(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from a3c_mp.algorithms.actor_critic import Samples, advantages_and_targets
from a3c_mp.algorithms.actor_critic_settings import PRESETS, A3CArgs
from a3c_mp.algorithms.gradients import GradientSetup, MeanGradient, Outbox
from a3c_mp.chapter import Chapter
from a3c_mp.config import Between, Count
from a3c_mp.data.actor import make_envs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.maths.losses import normalize
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.run.learner import Learner
from train_a3c_data import backward, loss


@dataclass(frozen=True)
class Args(A3CArgs):
    """Settings of chapter 2."""

    chapter = "a3c_grad"
    actors_learn = True
    # Again, since inherited ones may not change a default of this class, as they do with the batch size.
    continuous: ClassVar = A3CArgs.continuous
    vectors: ClassVar = A3CArgs.vectors
    changes: ClassVar[dict[str, dict[str, Any]]] = {
        "PongNoFrameskip-v4": {"explore_envs": 0.25},
        **{env_id: {"batch_size": 32} for env_id in ("CartPole-v0", "CartPole-v1")},
        **{env_id: {"batch_size": 64} for env_id in ("Pendulum-v1", "HalfCheetah-v5", "Hopper-v5")},
    }

    batch_size: Count = 256
    """samples in one gradient, at most T * B; sending a gradient costs the same for any batch size"""
    grads_per_step: Count = 1
    """gradients averaged in one optimizer step (K)"""
    max_lag: Annotated[int, Between(0)] | None = None
    """max policy lag: drop gradients computed at weights more than this many updates old"""
    sync: bool = False
    """synchronous A2C: one gradient of every actor in each step, all at the same weights; --deterministic implies it"""

    @property
    def in_order(self) -> bool:
        return self.sync or self.deterministic


def actor(channel: Any, args: Args) -> Callable[..., Any]:
    """An actor's process: it collects rollouts, and fills each slot with the gradient of one of their minibatches."""
    env = make_envs(args, channel)
    collector = RolloutCollector(args, env, channel)  # acts in bfloat16 where that is faster
    net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net_spec)
    net.to(channel.memory.weights.device)  # float32: gradients are computed with it
    outbox = Outbox(args, collector, net)

    def batches() -> Iterator[Samples]:
        """Minibatches of one rollout after the other."""
        while True:
            rollout = outbox.collect()
            advantages, value_targets = advantages_and_targets(args, rollout, outbox.reward_scale)
            advantages = normalize(advantages) if args.normalize_advantages else advantages
            samples = Samples.of(rollout, advantages, value_targets).to(channel.memory.weights.device)
            yield from map(samples.select, outbox.unsent(len(samples.obs)))

    def fill(token: Any) -> Any:
        batch = next(minibatches)
        version = channel.memory.load(net, token)  # the newest weights, for every gradient
        net.zero_grad(set_to_none=True)
        _, metrics = backward(args, net, loss, batch)
        return outbox.write(token, version, metrics, len(batch.obs))

    minibatches = batches()
    return fill


def train(args: Args, learner: Learner) -> None:
    """Average gradients, which are finite and not too old, and take a step with the mean of K."""
    mean = MeanGradient(learner.net)
    for gradients in learner.rounds():  # one gradient, or with --sync one of every actor
        for vector in gradients:
            mean.add(vector)
        if mean.count >= (1 if args.in_order else args.grads_per_step):
            grad_norm = mean.finish(args.max_grad_norm)
            learner.optimizer.step()
            learner.record_update({"losses/grad_norm": grad_norm})


main = Chapter(Args, PRESETS, actor, train, GradientSetup)

if __name__ == "__main__":
    main.run_as_script()
