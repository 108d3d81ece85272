"""Chapter 3. Ape-X: actors fill a prioritised replay, the learner draws from all of it.

Each actor process steps a vector of environments, every one with its own amount of exploration, and writes what it sees
into its own shard of a replay in shared memory, together with a first priority. The learner draws transitions in
proportion to priority, learns from them off policy, and gives them the priority that its own TD error suggests.

    actor 0 --(rows)--> shard 0 \\
    actor 1 --(rows)--> shard 1 --(batch)--> learner --(priorities)--> replay
                                               |--(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

import copy

import torch
from torch import Tensor, nn

from a3c_mp import apex, ddpg, dqn
from a3c_mp.apex import PRESETS
from a3c_mp.apex import ApexArgs as Args
from a3c_mp.collect import derive_seeds
from a3c_mp.config import check_env, exit_with, parse_args
from a3c_mp.device import set_up_torch
from a3c_mp.guard import Guard
from a3c_mp.nets import is_image
from a3c_mp.precision import compute_dtype
from a3c_mp.replay import Batch, Prefetch, Replay, Shards, Writer, importance_weights
from a3c_mp.rollout import EpisodeStats
from a3c_mp.run import Run
from a3c_mp.schedules import linear
from a3c_mp.slots import Slots
from a3c_mp.weights import Weights
from a3c_mp.workers import Link, Workers
from wrappers import make_vec_env

ALGORITHMS = {"dqn": dqn, "ddpg": ddpg}


def actor(link: Link, args: Args, shards: Shards, blocks: Slots, weights: Weights, start: int) -> None:
    """Spawned process: append to its shard, a block of steps for each leave it is given, until the learner ends it."""
    env_seed, action_seed = derive_seeds(args.seed, start, link.worker, link.generation)
    env = make_vec_env(args.env_id, args.num_envs, seed=env_seed)
    algo = ALGORITHMS[args.algo]
    net = algo.make_net(env.single_observation_space, env.single_action_space)
    net.to(weights.buffers.device, weights.buffers.dtype)
    obs, _ = env.reset()
    policy = algo.Policy(args, net, env.single_action_space, obs, link.worker, action_seed)
    writer = Writer(shards, link.worker, args.n_step, args.gamma)
    stats = EpisodeStats(args.num_envs)
    while True:
        slot, version = link.take()
        version = weights.load(net, version if args.deterministic else None)
        for t in range(args.block_length):
            action, q, value = policy.act(obs, warm_up=start == version == 0)  # version 0 has learned nothing yet
            next_obs, reward, terminated, truncated, infos = env.step(policy.to_env(action))
            final_obs = infos["final_obs"] if truncated.any() else None
            writer.step(
                obs, action, apex.reward_to_learn(args, reward), terminated, truncated, q, value,
                final_obs=final_obs, final_value=None if final_obs is None else policy.value(final_obs),
                life_lost=infos.get("life_lost") if args.life_loss_terminal else None,
            )  # fmt: skip
            stats.step(reward, terminated | truncated)
            apex.write_stats(blocks[slot], t, stats)
            obs = next_obs
            link.beat()
        link.send(slot, version)


def learn(
    args: Args, run: Run, net: nn.Module, target_net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch,
    dtype: torch.dtype, guard: Guard,
) -> Tensor | None:  # fmt: skip
    """One gradient step on a batch; returns the new priorities of its transitions, None if the gradient was no good."""
    importance_exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
    weights = importance_weights(batch.probability, importance_exponent)
    if args.normalize_obs:
        net.norm.update(batch.obs[: apex.NORM_SAMPLES])
    loss, td_error, curves = ALGORITHMS[args.algo].loss(args, net, target_net, batch, weights, dtype)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norms = torch.zeros_like(loss)
    for group in optimizer.param_groups:
        curves["losses/grad_norm"] = nn.utils.clip_grad_norm_(group["params"], args.clip_grad)
        norms += curves["losses/grad_norm"]
    if not guard.accepts(norms, "the learner", f"gradient {run.updates + 1}"):
        return None
    optimizer.step()
    run.learned(curves, samples=args.batch_size)
    if run.updates % args.target_period == 0:
        apex.move_target(target_net, net, args.target_rate)
    return td_error.abs()


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    algo = ALGORITHMS[args.algo]
    obs_space, action_space = check_env(args.env_id, algo.ACTIONS)
    device = set_up_torch(args)
    net = algo.make_net(obs_space, action_space).to(device)
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = algo.make_optimizer(args, net)
    dtype = compute_dtype(args.precision, device, is_image(obs_space))

    shards, blocks = apex.allocate(args, obs_space, algo.stored_actions(action_space))
    replay = Replay(shards, args.priority_exponent, args.seed)
    slots_per_actor = apex.blocks_under_way(args)

    extra = {"target_net": target_net, **({"replay": replay} if args.save_replay else {})}
    with Run(args, f"apex_{args.algo}", net, optimizer, extra) as run:
        run.gauges |= apex.gauges(replay, shards)
        if args.resume and not replay.size:
            run.log.info(f"the replay is empty: learning goes on once it holds {args.learning_starts:,} transitions")
        weights = Weights(net, dtype)

        def make_room() -> None:
            for shard in range(args.num_actors):
                replay.make_room(shard, apex.room(args))

        def replaced(incident: str) -> None:
            run.worker_restarted(incident)
            make_room()  # the successor writes its blocks behind what the dead one had begun

        make_room()  # a replay that was restored may be full
        workers = Workers(
            actor, args.num_actors, (args, shards, blocks, weights, run.steps), slots_per_worker=slots_per_actor,
            in_order=args.deterministic, max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
            on_restart=replaced,
        )  # fmt: skip
        # A deterministic learner takes one block of every actor, in order, before it learns and publishes.
        group_size = args.num_actors if args.deterministic else 1
        used: list[int] = []
        whole, grads = Guard(run, "blocks_not_finite"), Guard(run, "grads_not_finite")
        owed = 0.0  # samples that may be learned for the steps collected
        batches = Prefetch(replay, args.batch_size, ahead=0 if args.deterministic else args.prefetch, pin=args.cuda)
        with batches, workers, apex.divergence_named():
            for worker, slot, version in run.timing.each("waiting", workers.filled(run.should_stop)):
                rejected_before = replay.rejected
                replay.announce(worker)
                whole.accepts(replay.rejected == rejected_before, f"actor {worker}", f"a block of actor {worker}")
                steps = args.block_length * args.num_envs
                run.consumed(steps, apex.finished_episodes(blocks[slot]), worker, weights.version - version)
                used.append(slot)
                if len(used) < group_size:
                    continue
                if replay.size >= args.learning_starts:
                    owed += args.replay_ratio * steps * group_size
                updates_before = run.updates
                while owed >= args.batch_size and not run.should_stop():
                    with run.timing("drawing"):
                        batch = batches.next()
                    with run.timing("learning"):
                        on_device = Batch(*(field.to(device, non_blocking=True) for field in batch))
                        priorities = learn(args, run, net, target_net, optimizer, on_device, dtype, grads)
                        if priorities is not None:
                            replay.update(batch.ids, priorities.cpu())
                    owed -= args.batch_size
                with run.timing("publishing"):
                    published = weights.publish(net) if run.updates > updates_before else weights.version
                for slot in used:
                    replay.make_room(slot // slots_per_actor, apex.room(args))
                    workers.release(slot, published)
                used.clear()
                run.tick()
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
