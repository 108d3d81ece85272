"""Chapter 3. Ape-X: actors fill a prioritised replay, the learner draws from all of it.

Each actor process steps a vector of environments, every one with its own amount of exploration, and writes what it sees
into its own shard of a replay in shared memory, together with a first priority. The learner draws transitions in
proportion to priority, learns from them off policy, and gives them the priority that its own TD error suggests.

    actor 0 --(rows)--> shard 0 \\
    actor 1 --(rows)--> shard 1 --(batch)--> learner --(priorities)--> replay
                                               |--(weights, version)--> its actors
                                               | gradients, averaged
                                            learner 1, 2, ... each with actors and shards of its own
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

import torch
from torch import Tensor, nn

from a3c_mp import apex, ddpg, dqn
from a3c_mp.apex import PRESETS
from a3c_mp.apex import ApexArgs as Args
from a3c_mp.blocks import BlockCollector, finished_episodes
from a3c_mp.config import exit_with, parse_args
from a3c_mp.follower import Follower
from a3c_mp.guard import Guard
from a3c_mp.learners import Learners, Team
from a3c_mp.news import News, tell
from a3c_mp.precision import compute_dtype
from a3c_mp.replay import Batch, Prefetch, Shards, Writer, importance_weights
from a3c_mp.run import Run
from a3c_mp.schedules import linear
from a3c_mp.seeds import derive_seeds
from a3c_mp.slots import Slots
from a3c_mp.weights import Weights
from a3c_mp.workers import Filled, Link, Workers
from wrappers import make_vec_env

ALGORITHMS = {"dqn": dqn, "ddpg": ddpg}


def actor(link: Link, args: Args, shards: Shards, blocks: Slots, weights: Weights, first: int) -> None:
    """Spawned process: append to its shard, a block of steps for each token, until its learner ends it."""
    env_seed, action_seed = derive_seeds(args.seed, link.start, first + link.worker, link.generation)
    env = link.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed))
    net = ALGORITHMS[args.algo].make_net(env.single_observation_space, env.single_action_space)
    net.to(weights.buffers.device, weights.buffers.dtype)
    collector = BlockCollector(args, env, Writer(shards, link.worker, args.n_step, args.gamma), link.beat)
    space = env.single_action_space
    policy = ALGORITHMS[args.algo].Policy(args, net, space, collector.obs, first + link.worker, action_seed)
    while True:
        slot, version = link.take()
        version = weights.load(net, version if args.deterministic else None)
        nothing_learned = link.start == version == 0  # dqn acts at random
        collector.collect(blocks[slot], policy, warm_up=nothing_learned)
        link.send(slot, version)


def learn(
    args: Args, run: Run | Follower, team: Team, net: nn.Module, target_net: nn.Module,
    optimizer: torch.optim.Optimizer, batch: Batch, dtype: torch.dtype, guard: Guard,
) -> Tensor | None:  # fmt: skip
    """One gradient step on a batch; returns the new priorities of its transitions, None if the gradient was no good."""
    importance_exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
    smallest = team.gather(batch.probability.min()[None]).min()
    is_weights = importance_weights(batch.probability, importance_exponent, smallest)
    if args.normalize_obs:
        stride = -(-args.batch_size // apex.NORM_SAMPLES)  # from all of the batch, which is in order of lanes
        net.norm.update(team.gather(batch.obs[::stride]))
    loss, td_error, curves = ALGORITHMS[args.algo].loss(args, net, target_net, batch, is_weights, dtype)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    team.average_gradients(net, loss)
    curves["losses/grad_norm"] = norm = apex.clip_gradients(optimizer, args.clip_grad)
    # Huber's gradient is finite even where a TD error is not: the loss tells.
    if not guard.accepts(norm + loss.detach(), "the learners", f"gradient {run.updates + 1}"):
        return None
    optimizer.step()
    run.learned(curves, samples=args.batch_size * team.size)
    if run.updates % args.target_period == 0:
        apex.move_target(target_net, net, args.target_rate)
    return td_error.abs()


def train(args: Args, run: Run | Follower, team: Team, parts: apex.Parts) -> None:
    """What every learner does: fill a replay from its own actors, and take every gradient step with the others."""
    net, target_net, optimizer, replay, blocks = parts
    team.synchronize(nn.ModuleList([net, target_net]), optimizer)
    device = next(net.parameters()).device
    dtype = compute_dtype(args.precision, device, net.norm.image)
    weights = Weights(net, dtype)
    shards, slots_per_actor = replay.shards, apex.blocks_under_way(args)
    first = team.rank * shards.num_shards
    incidents: list[str] = []

    def replaced(incident: str) -> None:
        incidents.append(incident)
        apex.make_room(args, replay)  # the successor writes its blocks behind what the dead one had begun

    apex.make_room(args, replay)  # one that was restored may be full
    workers = Workers(
        actor, shards.num_shards, (args, shards, blocks, weights, first), start=run.steps,
        slots_per_worker=slots_per_actor, in_order=args.deterministic, max_restarts=args.max_restarts,
        hang_seconds=args.hang_seconds, on_restart=replaced, first_actor=first,
    )  # fmt: skip
    # Deterministic learners take one block of every actor, in order, before they learn and publish.
    group_size = shards.num_shards if args.deterministic else 1
    steps = args.block_length * args.num_envs
    held: list[Filled] = []
    block_guard = Guard(run, "blocks_not_finite", in_a_row=apex.bad_blocks_in_a_row(args))
    grad_guard = Guard(run, "grads_not_finite")
    owed = 0.0  # samples that this learner may learn for the steps of its own actors
    batches = Prefetch(replay, args.batch_size, ahead=0 if args.deterministic else args.prefetch, pin=args.cuda)
    with batches, workers:
        for filled in run.timing.each("waiting", workers.filled(run.should_stop)):
            held.append(filled)
            if len(held) < group_size:
                continue
            news = [
                News(steps, finished_episodes(blocks[slot]), first + worker, weights.version - version,
                     apex.take_in(replay, worker)) for worker, slot, version in held
            ]  # fmt: skip
            with run.timing("waiting"):
                _, sizes = tell(team, run, block_guard, news, incidents, replay.size)
            if sum(sizes) >= args.learning_starts and min(sizes) > 0:
                owed += args.replay_ratio * steps * group_size
            updates_before = run.updates
            while owed >= args.batch_size and not run.should_stop():
                with run.timing("drawing"):
                    batch = batches.next()
                with run.timing("learning"):
                    on_device = Batch(*(field.to(device, non_blocking=True) for field in batch))
                    priorities = learn(args, run, team, net, target_net, optimizer, on_device, dtype, grad_guard)
                    if priorities is not None:
                        replay.update(batch.ids, priorities.cpu())
                owed -= args.batch_size
            with run.timing("publishing"):
                published = weights.publish(net) if run.updates > updates_before else weights.version
            if run.tick():
                owed = 0.0
                workers.start_anew(run.steps, published)
            if run.should_stop():  # the replay is saved as it is now: nobody may append to it any more
                break
            for worker, slot, _ in held:
                replay.make_room(worker, apex.room(args))
                workers.release(slot, published)
            held.clear()


def follow(team: Team, args: Args, steps: int, updates: int) -> None:
    """Spawned process: a learner besides the first."""
    train(args, Follower(args, team.rank, steps, updates), team, apex.set_up(args, ALGORITHMS[args.algo], team.rank))


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    parts = apex.set_up(args, ALGORITHMS[args.algo])
    extra = {"target_net": parts.target_net, **({"replay": parts.replay} if args.save_replay else {})}
    with (
        Run(args, f"apex_{args.algo}", parts.net, parts.optimizer, extra) as run,
        Learners.of(run, args.num_learners, follow, args) as team,
    ):
        apex.show_replay(run, args, parts.replay)
        train(args, run, team, parts)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
