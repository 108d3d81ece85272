"""The stages that every agent step goes through, each alone on one core, with the trainer's own settings and code."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import train_a3c_data
import train_apex
import train_impala
from a3c_mp.algorithms import actor_critic, apex, ddpg, dqn, impala
from a3c_mp.algorithms.actor_critic import Samples
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import empty_rollout, minibatches, rollout_spec, write_step
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.replay import Batch
from wrappers import make_vec_env

Stages = dict[str, tuple[Callable[[], Any], int]]
"""name of a stage -> (one call of it, samples in the call)"""
Rates = dict[str, float]
"""name of a stage -> samples a second"""
BARRIER_SECONDS = 300.0
"""longest wait for the cores that measure a stage at the same time"""
_barrier: Any = None  # of those cores


@contextmanager
def actor_critic_stages(args: Any, device: torch.device, dtype: torch.dtype) -> Iterator[Stages]:
    """One step of the environments, one acting pass and one gradient step, on frames of the game itself."""
    env = make_vec_env(args.env_id, args.num_envs, seed=args.seed)
    spaces = env.single_observation_space, env.single_action_space
    rng = torch.Generator(device).manual_seed(args.seed)
    acting_net = make_actor_critic(*spaces, args.net_spec).to(device, dtype)

    @torch.inference_mode()
    def act(obs: np.ndarray):
        logits, value = acting_net(torch.from_numpy(obs).to(device))
        logits, value = logits.float(), value.float()
        return logits, value, acting_net.distribution(logits).sample(rng).cpu().numpy()

    spec = rollout_spec(args.unroll_length, args.num_envs, *spaces)
    rollout = empty_rollout(spec)
    obs, _ = env.reset()
    for t in range(args.unroll_length):
        logits, value, action = act(obs)
        write_step(rollout, t, obs=obs, value=value, action=action, behaviour_logits=logits)
        obs, reward, terminated, truncated, infos = env.step(action)
        life_lost = infos.get("life_lost", False)
        write_step(rollout, t, reward=reward, terminated=terminated, truncated=truncated, life_lost=life_lost)
    write_step(rollout, args.unroll_length, obs=obs, value=act(obs)[1])
    frames, actions = cycle(rollout.obs.numpy()), cycle(rollout.action.numpy())

    net = make_actor_critic(*spaces, args.net_spec).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    samples = Samples.of(args, rollout.to(device))
    net.norm.update(samples.obs)
    indices = list(minibatches(len(samples.obs), args.batch_size, 1, torch.Generator().manual_seed(args.seed), device))
    whole = [chosen.to(device) for chosen in indices if len(chosen) == len(indices[0])]
    batches = cycle([samples.select(chosen) for chosen in whole])

    def learn() -> None:
        loss, _ = train_a3c_data.loss(args, net, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
        optimizer.step()

    yield {
        "env": (lambda: env.step(next(actions)), args.num_envs),
        "act": (lambda: act(next(frames)), args.num_envs),
        "learn": (learn, len(indices[0])),
    }
    env.close()


@contextmanager
def impala_stages(args: Any, device: torch.device, dtype: torch.dtype) -> Iterator[Stages]:
    """The same for unrolls; replayed ones make a gradient step longer and are not counted."""
    env = make_vec_env(args.env_id, args.num_envs, seed=args.seed)
    spaces = env.single_observation_space, env.single_action_space
    acting_net = make_actor_critic(*spaces, args.net_spec).to(device, dtype)
    channel: Any = SimpleNamespace(seed_key=(0,), restored=None, beat=lambda: None)
    collector = RolloutCollector(args, env, acting_net, channel)
    spec = rollout_spec(args.unroll_length, args.num_envs, *spaces, acting_net.lstm_size)
    rollout = empty_rollout(spec)
    collector.collect(rollout)
    frames, actions = cycle(rollout.obs), cycle(rollout.action.numpy())

    net = make_actor_critic(*spaces, args.net_spec).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    net.norm.update(rollout.obs.flatten(0, 1).to(device))
    batch_size = args.batch_unrolls if args.replay_proportion else min(args.batch_unrolls, args.num_envs)
    batch = impala.select(rollout.to(device), torch.arange(batch_size, device=device) % args.num_envs)

    def learn() -> None:
        loss, _ = train_impala.loss(args, net, batch, LearnerGroup())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
        optimizer.step()

    def act() -> Tensor:
        return (
            acting_net.distribution(collector.act(next(frames), collector.lstm_state_before)[0])
            .sample(collector.rng)
            .cpu()
        )

    yield {
        "env": (lambda: env.step(next(actions)), args.num_envs),
        "act": (act, args.num_envs),
        "learn": (learn, min(args.fresh_unrolls, batch_size) * args.unroll_length),
    }
    env.close()


@contextmanager
def apex_stages(args: Any, device: torch.device, dtype: torch.dtype) -> Iterator[Stages]:
    """One step of the environments, one acting pass and one gradient step, on transitions of one step of the game."""
    algo = {"dqn": dqn, "ddpg": ddpg}[args.algo]
    env = make_vec_env(args.env_id, args.num_envs, seed=args.seed)
    spaces = env.single_observation_space, env.single_action_space
    obs, _ = env.reset()
    acting_net = algo.make_net(*spaces).to(device, dtype)
    policy = algo.Policy(args, acting_net, spaces[1], obs, 0)
    policy.start_block(args.seed)

    steps = []
    for _ in range(-(-args.batch_size // args.num_envs)):
        action = policy.act(obs, warm_up=True)[0]
        next_obs, reward, terminated, _, _ = env.step(policy.to_env(action))
        no_mask, number = np.ones((len(obs), 0), np.bool_), np.arange(len(obs))
        discount = args.gamma * ~terminated
        steps.append((obs, action, reward, discount, next_obs, no_mask, np.ones(len(obs)), number))
        obs = next_obs
    fields = [
        torch.from_numpy(np.concatenate(field))[: args.batch_size].to(device) for field in zip(*steps, strict=True)
    ]
    batch = Batch(*fields)._replace(reward=fields[2].float(), discount=fields[3].float())
    observations, actions = cycle([step[0] for step in steps]), cycle([step[1] for step in steps])

    net = algo.make_net(*spaces).to(device)
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = algo.make_optimizer(args, net)
    learner = apex.LearnerState(algo, net, target_net, optimizer, None, None, spaces[1])  # type: ignore[arg-type]

    def learn() -> None:
        loss, _, _ = train_apex.loss(args, learner, batch, batch.probability.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        apex.clip_gradients(optimizer, args.max_grad_norm)
        optimizer.step()

    yield {
        "env": (lambda: env.step(policy.to_env(next(actions))), args.num_envs),
        "act": (lambda: policy.act(next(observations)), args.num_envs),
        "learn": (learn, args.batch_size),
    }
    env.close()


STAGES: dict[str, Callable[[Any, torch.device, torch.dtype], AbstractContextManager[Stages]]] = {
    "a3c_data": actor_critic_stages,
    "a3c_grad": actor_critic_stages,
    "impala": impala_stages,
    "apex_dqn": apex_stages,
    "apex_ddpg": apex_stages,
    "task": actor_critic_stages,
}
"""chapter -> its stages, named as in `bound`"""


def learning_threads(chapter: str, settings: Any) -> int:
    """On how many threads a chapter computes gradients: those of its learners, or one for each actor."""
    return (
        settings.num_actors
        if chapter == "a3c_grad"
        else settings.learner_threads * getattr(settings, "num_learners", 1)
    )


class Setup(NamedTuple):
    """What is measured, and how long each stage."""

    chapter: str
    settings: Any
    device: torch.device
    dtype: torch.dtype
    seconds: float


def measure(setup: Setup) -> Rates:
    """Samples a second of each stage of a chapter, one after the other, on one core while the others rest."""
    return _measure(setup, max(os.sched_getaffinity(0)), lambda: None)


def measure_on_all_cores(setup: Setup, cores: int) -> Rates:
    """The same while `cores` cores do the same, means over them: they share caches, memory and the power budget."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(cores)
    tasks = [(setup, core) for core in sorted(os.sched_getaffinity(0))[-cores:]]
    with context.Pool(cores, _meet_at, (barrier,)) as pool:
        found = pool.starmap(_measure_with_others, tasks, chunksize=1)
    return {name: statistics.mean(rates[name] for rates in found) for name in found[0]}


def _meet_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _measure_with_others(setup: Setup, core: int) -> Rates:
    return _measure(setup, core, lambda: _barrier.wait(BARRIER_SECONDS))


def _measure(setup: Setup, core: int, begin: Callable[[], Any]) -> Rates:
    torch.set_num_threads(1)
    rates = {}
    with pinned_to(core), STAGES[setup.chapter](setup.settings, setup.device, setup.dtype) as stages:
        for name, (call, samples) in stages.items():
            begin()
            rates[name] = rate(call, samples, setup.seconds, setup.device)
    return rates


def rate(call: Callable[[], Any], samples: int, seconds: float, device: torch.device) -> float:
    """Samples a second that repeated calls reach, after a fifth of the time to warm up."""
    for duration in (seconds / 5, seconds):
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < duration:
            call()
            calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
    return calls * samples / elapsed


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Confine this thread, and threads that it starts meanwhile, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def bound(rates: Rates, *, cores: float, passes: float, learner_threads: int, cuda: bool) -> tuple[float, str]:
    """(agent steps a second at most, what limits them), from samples a second of each stage on one core.

    A step is paid for once in the environment, once in acting and `passes` times in learning, which uses one core for
    each of `learning_threads`. With the nets on a GPU only the environments take the CPU's time.
    """
    env, act, learn = (rates[name] for name in ("env", "act", "learn"))
    if cuda:
        return cores * env, "environments"
    limits = {
        "cores": cores / (1 / env + 1 / act + passes / learn),
        "learner": min(learner_threads, cores) * learn / passes,
    }
    name = min(limits, key=limits.__getitem__)
    return limits[name], name
