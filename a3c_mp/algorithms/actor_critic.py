"""Actor-critics: the slots, optimizer and rounds of a learner of rollouts; rewards, advantages and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from a3c_mp.algorithms.actor_critic_settings import A3CArgs, PPOArgs, RolloutArgs
from a3c_mp.config import CommonArgs
from a3c_mp.data.collector import acting_state_spec
from a3c_mp.data.episodes import episodes_at
from a3c_mp.data.resume_states import ActorLayout
from a3c_mp.data.rollout import Rollout, is_finite, rollout_spec
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.maths import returns
from a3c_mp.maths.losses import Metrics
from a3c_mp.maths.return_stats import LARGEST_REWARD, ReturnStats
from a3c_mp.maths.schedules import linear, set_learning_rate
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.preflight import check_memory, probe_env, set_up_torch
from a3c_mp.wrappers import ActionScaling

NORM_STEPS = 2  # images of each environment in a rollout that update the statistics: enough samples, at low cost


class A3CSetup(Setup):
    """What a learner of an actor-critic makes before its run: net, optimizer, and slots for what its actors send.

    An actor sends `messages` for each rollout. Raises ConfigError where environment, sizes or memory do not fit.
    """

    slots_with_actors = False  # whether slots lie on the device that actors act on, else on the CPU

    def __init__(self, args: Any, rank: int = 0, messages: int = 1):
        from a3c_mp.run.gpu import choose_acting  # here, as actors need none of it

        if getattr(args, "batch_size", 1) > args.unroll_length * args.num_envs:
            why = f"a rollout has only {args.unroll_length} * {args.num_envs} samples"
            raise ConfigError("batch-size", args.batch_size, why, "lower it, or raise --unroll-length or --num-envs")
        obs_space, action_space = probe_env(args.env_id)
        device = set_up_torch(args, rank)
        if rank == 0 and ":" not in args.net:  # a net of the user's own may not be made without memory
            with torch.device("meta"):
                check_memory(args, make_actor_critic(obs_space, action_space, args.net_spec))
        net = make_actor_critic(obs_space, action_space, args.net_spec).to(device)
        if not args.normalize_obs:
            net.norm.turn_off()
        state = acting_state_spec(args.num_envs, action_space, net.lstm_size)
        layout = ActorLayout(action_space, args.unroll_length, state, args.slots_per_actor, messages)
        spec = self.slot_spec(args, net, obs_space, action_space)
        acting = choose_acting(args, net)
        if args.deterministic and args.slots_per_actor > 2:
            why = "--deterministic keeps two versions of the weights, so at most two rollouts can be in flight"
            raise ConfigError("slots-per-actor", args.slots_per_actor, why, "use 1 or 2")
        num_slots = args.max_actors // getattr(args, "num_learners", 1) * args.slots_per_actor
        acts_on_gpu, pin_for = acting.device.type == "cuda", device if device.type == "cuda" else None
        try:
            if self.slots_with_actors and acts_on_gpu:
                slots = Slots(spec, num_slots, acting.device)
            else:  # pinned for a learner's net on a GPU, and for those of actors
                slots = Slots(spec, num_slots, pin_for=pin_for, everywhere=acts_on_gpu)
        except (MemoryError, torch.OutOfMemoryError) as error:  # of the machine, or of its GPU
            why = str(error) if isinstance(error, MemoryError) else one_line(error)
            raise ConfigError("num-envs", args.num_envs, why, "lower it, --num-actors or --unroll-length") from error
        super().__init__(net, make_optimizer(args, net), slots, layout, acting)
        self.return_stats = ReturnStats(args.gamma, args.max_actors, args.num_envs, args.reward_clip)
        self.saved = {"obs_stats": net.norm.stats, "return_stats": self.return_stats}

    def slot_spec(self, args: Any, net: Any, obs_space: gymnasium.Space, action_space: gymnasium.Space) -> Spec:
        sizes = args.unroll_length, args.num_envs
        return rollout_spec(*sizes, obs_space, action_space, net.lstm_size, args.rollout_fields)

    def rounds(self, learner: Learner) -> Iterator[Any]:
        """Yield finite rollouts; a round is one rollout, or in order one of every actor."""
        while filled := learner.take():
            yield from rollouts(learner, filled)
            if learner.end_round():
                learner.release(filled)


def rollouts(learner: Learner, filled: list) -> Iterator[Rollout]:
    """Record the rollouts of a round one by one, and yield those that are finite, in their slots."""
    for message in filled:
        rollout = Rollout.of(learner.memory.slots[message.slot])
        set_learning_rate(learner)  # of the steps before this rollout
        if learner.record([message], [stats_of(rollout, learner.lag(message.payload))]).finite:
            with learner.run.timing("learning"):
                source = f"{learner.args.actor_name} {learner.own[message.worker]}"
                learner.update_norm(obs_for_stats(rollout.obs, learner.net.norm.has_images), source)
                learner.run.record_metrics(action_metrics(learner.setup.layout.action_space, rollout))
                yield rollout


def action_metrics(space: gymnasium.Space, rollout: Rollout) -> Metrics:
    """The share of the numbers in continuous actions that are at a bound of the space, or beyond it."""
    if not isinstance(space, Box):
        return {}
    scaling, action = ActionScaling(space), rollout.action
    low, high = (torch.from_numpy(bound).to(action) for bound in (scaling.lowest, scaling.highest))
    return {"policy/at_bounds": ((action <= low) | (action >= high)).float().mean()}


def stats_of(rollout: Rollout, policy_lag: int) -> MessageStats:
    rewards = rollout.reward, rollout.done
    episodes = episodes_at(rollout.done, rollout.episode_return, rollout.episode_length)
    return MessageStats(rollout.reward.numel(), episodes, policy_lag, is_finite(rollout), rewards)


def obs_for_stats(obs: Tensor, image: bool) -> Tensor:
    """Select the observations [N, *obs_shape] of [T + 1, B, *obs_shape] that update the observation statistics.

    Images: `NORM_STEPS` of each environment, evenly spaced over the rollout: games that started together are in the
    same phase, so of the last steps alone the statistics would oscillate. Vectors: all that are new.
    """
    num_steps, num_envs = obs.shape[0] - 1, obs.shape[1]
    if not image:
        return obs[1:].flatten(0, 1)
    number = torch.arange(NORM_STEPS * num_envs, device=obs.device)
    return obs[1 + number * num_steps // len(number), number % num_envs]


def make_optimizer(args: RolloutArgs, net: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    return torch.optim.RMSprop(net.parameters(), lr=args.learning_rate, alpha=0.99, eps=args.rmsprop_eps)


def anneal_entropy_coef(args: PPOArgs, steps: int) -> PPOArgs:
    """Return the settings with the entropy coefficient after `steps`: linear to its end over `--entropy-steps`."""
    if args.entropy_coef_end is None:
        return args
    total = args.entropy_steps or args.total_steps
    return replace(args, entropy_coef=linear(args.entropy_coef, args.entropy_coef_end, steps, total))


def rewards_and_discounts(args: CommonArgs, rollout: Rollout, reward_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (clipped and scaled rewards, discounts), both [T, B]; discounts are 0 where a return ends.

    `reward_scale` is that of the net whose values they are learned with. At truncated steps, the reward includes the
    bootstrap value (see `cut_truncated`).
    """
    rewards = reward_scale * (rollout.reward.sign() if args.reward_clip else rollout.reward)
    if args.reward_scale is None:
        rewards = rewards.clamp(-LARGEST_REWARD, LARGEST_REWARD)  # the scale may not know of an outlier yet
    ended = rollout.terminated | rollout.life_lost if args.life_loss_terminal else rollout.terminated
    discounts = args.gamma * (~ended).float()
    return returns.cut_truncated(rewards, discounts, rollout.truncated, rollout.truncation_value)


def advantages_and_targets(args: A3CArgs, rollout: Rollout, reward_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Compute (advantages, value targets), both [T, B], by GAE or n-step returns from the values of the acting pass.

    For rollouts on the CPU: on a GPU, the recurrence over T small steps would be hundreds of kernels.
    """
    rewards, discounts = rewards_and_discounts(args, rollout, reward_scale)
    values = rollout.value
    if args.returns == "gae":
        return returns.gae(rewards, discounts, values[:-1], values[-1], args.gae_lambda)
    value_targets = returns.n_step_returns(rewards, discounts, values[:-1], values[-1], args.n_step)
    return value_targets - values[:-1], value_targets


class Samples(NamedTuple):
    """A batch of N steps with advantages and value targets, in any order."""

    obs: Tensor  # [N, *obs_shape]
    action: Tensor  # [N, *action_shape], as sampled
    behaviour_logits: Tensor  # [N, P] float32, of the policy that acted
    advantages: Tensor  # [N] float32, constants
    value_targets: Tensor  # [N] float32, constants
    extra: Mapping[str, Tensor] = {}  # [N, ...], fields that a chapter adds to its rollouts

    @classmethod
    def of(cls, rollout: Rollout, advantages: Tensor, value_targets: Tensor) -> Samples:
        """Flatten the steps of a rollout, with advantages and value targets [T, B], into samples."""
        acted = rollout.obs[:-1], rollout.action, rollout.behaviour_logits
        return cls(*acted, advantages, value_targets, rollout.extra).map(lambda field: field.flatten(0, 1))

    def to(self, device: torch.device) -> Samples:
        """Copy the samples to a device; from pinned memory to a GPU, the copies are asynchronous."""
        return self.map(lambda field: field.to(device, non_blocking=True))

    def select(self, indices: Tensor) -> Samples:
        """Return the samples at int64 indices [M]."""
        return self.map(lambda field: field.index_select(0, indices))

    def map(self, function: Callable[[Tensor], Tensor]) -> Samples:
        """Return samples with `function` applied to every field."""
        extra = {name: function(field) for name, field in self.extra.items()}
        return Samples(*map(function, self[:5]), extra=extra)  # type: ignore[arg-type, misc]
