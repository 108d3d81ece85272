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
from torch import Tensor

from a3c_mp.algorithms import apex, ddpg, dqn
from a3c_mp.algorithms.apex import PRESETS
from a3c_mp.algorithms.apex import ApexArgs as Args
from a3c_mp.cli import parse_args
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.data.transitions import TransitionCollector, finished_episodes
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.precision import compute_dtype
from a3c_mp.nets.q_values import ReplayNet
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.learners import LearnerGroup, Learners, Stateful
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import RestartMessage
from a3c_mp.replay import Batch, Prefetch, Shards, importance_weights
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.message_stats import MessageStats, log_restarts_on_exit, sync_counters
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.seeds import derive_seeds
from wrappers import make_vec_env

ALGORITHMS = {"dqn": dqn, "ddpg": ddpg}


def actor(
    channel: WorkerChannel, args: Args, shards: Shards, blocks: Slots, weights: Weights, states: ActorStates
) -> None:
    """Spawned process: append to its shard, a block of steps for each token, until its learner ends it."""
    env_seed, _ = derive_seeds(args.seed, *channel.entropy)
    env = channel.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed, rebuildable=args.deterministic))
    algo, space = ALGORITHMS[args.algo], env.single_action_space
    net = algo.make_net(env.single_observation_space, space)
    net.to(weights.buffers.device, weights.buffers.dtype)
    collector = TransitionCollector(args, env, shards, args.n_step, channel)
    policy = algo.Policy(args, net, space, collector.obs, channel.actor, collector.games.carried)
    while True:
        slot, version = channel.take()
        version = weights.load(net, version if args.deterministic else None)
        nothing_learned = weights.untrained and version == 0  # dqn acts at random
        collector.collect(block := blocks[slot], policy, warm_up=nothing_learned)
        states.write(slot, collector.to_write, block, policy)
        channel.send(slot, version)


def learn(
    args: Args, run: Run | ReplicaRun, group: LearnerGroup, net: ReplayNet, target_net: ReplayNet,
    optimizer: torch.optim.Optimizer, batch: Batch, dtype: torch.dtype, guard: FiniteGuard,
) -> Tensor | None:  # fmt: skip
    """One gradient step on a batch; returns the new priorities of its transitions, None if the gradient was no good."""
    importance_exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
    smallest = group.all_gather(batch.probability.min()[None]).min()
    is_weights = importance_weights(batch.probability, importance_exponent, smallest)
    if args.normalize_obs:
        stride = -(-args.batch_size // apex.NORM_SAMPLES)  # from all of the batch, which is in order of lanes
        update_norm(run, net.norm, group.all_gather(batch.obs[::stride]), "the replay")
    loss, td_error, metrics = ALGORITHMS[args.algo].loss(args, net, target_net, batch, is_weights, dtype)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    group.all_reduce_gradients(net, loss)
    metrics["losses/grad_norm"] = norm = apex.clip_gradients(optimizer, args.clip_grad)
    # Huber's gradient is finite even where a TD error is not: the loss tells.
    if not guard.check(norm + loss.detach(), "the learners", f"gradient {run.updates + 1}"):
        return None
    optimizer.step()
    run.record_update(metrics, samples=args.batch_size * group.size)
    if run.updates % args.target_period == 0:
        apex.move_target(target_net, net, args.target_rate)
    return td_error.abs()


def train(args: Args, run: Run | ReplicaRun, group: LearnerGroup, parts: apex.LearnerState) -> None:
    """What every learner does: fill a replay from its own actors, and take every gradient step with the others."""
    net, target_net, optimizer, replay, blocks, action_space = parts
    device = next(net.parameters()).device
    dtype = compute_dtype(args.precision, device, net.norm.image)
    group.broadcast_state(net, target_net, optimizer)
    weights = Weights(net, dtype, untrained=run.updates == 0)
    own = group.own_actors(args.num_actors)
    carried = apex.carried_spec(args, ALGORITHMS[args.algo], action_space)
    states = ActorStates(
        args, action_space, args.block_length, carried, start=run.steps, own=own,
        slots_per_actor=apex.blocks_under_way(args),
    )  # fmt: skip
    limiter = apex.RateLimiter(args.replay_ratio)
    if args.save_replay:  # without it, actors start new games when the run is resumed
        run.keep(actors=states, weights=weights, limiter=limiter)
    restart_messages: list[RestartMessage] = []

    def on_restart(message: RestartMessage) -> None:
        restart_messages.append(message)
        apex.prepare_successor(args, replay, message, own.start)

    apex.make_room(args, replay)  # one that was restored may be full
    workers = states.workers(actor, (replay.shards, blocks, weights), weights, on_restart)
    steps = args.block_length * args.num_envs
    block_guard = FiniteGuard(run, "blocks_not_finite", in_a_row=apex.bad_blocks_in_a_row(args))
    grad_guard = FiniteGuard(run, "grads_not_finite")
    batches = Prefetch(replay, args.batch_size, ahead=0 if args.deterministic else args.prefetch, pin=args.cuda)
    with (
        batches,
        log_restarts_on_exit(run, restart_messages),
        workers,
    ):  # a round is one block, or in a deterministic run one of every actor, in order
        for filled in run.timing.each("waiting", workers.rounds(run.should_stop)):
            news = [
                MessageStats(steps, finished_episodes(blocks[slot]), own[worker], weights.version - version,
                     apex.take_in(replay, worker)) for worker, slot, version in filled
            ]  # fmt: skip
            with run.timing("waiting"):
                reports = states.read(filled)
                _, sizes = sync_counters(group, run, block_guard, news, restart_messages, states, reports, replay.size)
            if sum(sizes) >= args.learning_starts and min(sizes) > 0:
                limiter.insert(steps * len(filled))
            updates_before = run.updates
            while limiter.can_sample(args.batch_size) and (args.deterministic or not run.should_stop()):
                with run.timing("drawing"):
                    batch = batches.next()
                with run.timing("learning"):
                    on_device = Batch(*(field.to(device, non_blocking=True) for field in batch))
                    priorities = learn(args, run, group, net, target_net, optimizer, on_device, dtype, grad_guard)
                    if priorities is not None:
                        replay.update(batch.ids, priorities.cpu())
                limiter.sample(args.batch_size)
            with run.timing("publishing"):
                published = weights.publish(net) if run.updates > updates_before else weights.version
            run.end_round()
            if run.should_stop():  # the replay is saved as it is now: nobody may append to it any more
                break
            for worker, _, _ in filled:
                replay.make_room(worker, apex.room(args))
            workers.release(filled, published)


def follow(group: LearnerGroup, args: Args, steps: int, updates: int) -> None:
    """Spawned process: a learner besides the first."""
    train(
        args,
        ReplicaRun(args, group.rank, steps, updates),
        group,
        apex.build_learner(args, ALGORITHMS[args.algo], group.rank),
    )


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    parts = apex.build_learner(args, ALGORITHMS[args.algo])
    extra: dict[str, Stateful] = {"target_net": parts.target_net}
    if args.save_replay:
        extra["replay"] = parts.replay
    with (
        Run(args, f"apex_{args.algo}", parts.net, parts.optimizer, extra) as run,
        Learners.of(run, args.num_learners, follow, args) as group,
    ):
        apex.show_replay(run, args, parts.replay)
        train(args, run, group, parts)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
