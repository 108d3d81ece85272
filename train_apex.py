"""Chapter 3. Ape-X: actors fill a prioritized replay buffer, the learner samples from all of it.

Each actor process steps a vector of environments, each with its own epsilon or action noise, and writes transitions
with initial priorities into its own shard of a replay in shared memory. The learner samples transitions in proportion
to priority, learns from them off policy, and updates their priorities with its own TD errors.

    actor 0 --(rows)--> shard 0 \\
    actor 1 --(rows)--> shard 1 --(batch)--> learner --(priorities)--> replay
                                               |--(weights, version)--> its actors
                                               | gradients, averaged
                                            learner 1, 2, ... each with actors and shards of its own
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from torch import Tensor

from a3c_mp.algorithms import apex, ddpg, dqn
from a3c_mp.algorithms.apex import Algorithm, LearnerState
from a3c_mp.algorithms.apex_settings import PRESETS, Args
from a3c_mp.algorithms.rate_limiter import RateLimiter
from a3c_mp.cli import parse_args
from a3c_mp.data.games import make_envs
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.data.transitions import TransitionCollector
from a3c_mp.maths import losses
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.precision import acting_dtype, autocast
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.learners import Learners
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.replay import Batch, Prefetch, Shards, importance_weights
from a3c_mp.run.actors import Actors, processes
from a3c_mp.run.guard import NonFiniteFilter, update_norm
from a3c_mp.run.progress import RunState
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.script import exit_with

ALGORITHMS: dict[str, Algorithm] = {"dqn": dqn, "ddpg": ddpg}


def actor(
    channel: WorkerChannel, args: Args, shards: Shards, episode_stats: Slots, weights: Weights, states: ResumeStates
) -> None:
    """Actor process: append transitions to its shard, a block of steps at a time, until its learner stops it."""
    env, algo = make_envs(args, channel), ALGORITHMS[args.algo]
    net = algo.make_net(env.single_observation_space, env.single_action_space).to(weights.buffers)
    collector = TransitionCollector(args, env, shards, args.n_step, channel)
    policy = algo.Policy(
        args, net, env.single_action_space, collector.obs, channel.actor, collector.games.successor_state
    )
    for slot, version in channel.tokens():
        version = weights.load(net, version if args.deterministic else None)
        nothing_learned = weights.untrained and version == 0  # dqn then acts at random
        collector.collect(block := episode_stats[slot], policy, warm_up=nothing_learned)
        states.write(slot, collector.state_fields, block, policy)
        channel.send(slot, version)


def loss(args: Args, learner: LearnerState, batch: Batch, importance: Tensor) -> tuple[Tensor, Tensor, losses.Metrics]:
    """Compute (loss, TD errors [N], metrics) of n-step transitions (Horgan et al. 2018); importance weights [N]."""
    algo, net, target_net = learner.algo, learner.net, learner.target_net
    with autocast(args.precision, net):
        q = algo.q_values(net, batch)
        target = batch.reward + batch.discount * algo.bootstrap_values(net, target_net, batch)
        policy_loss, metrics = algo.policy_loss(net, batch)  # ddpg's; 0 for dqn
    td_error = target - q
    value_loss = losses.huber(td_error, importance)
    total = value_loss + policy_loss
    metrics |= {"values/q": q, "values/target": target, "values/td_error": td_error.abs()}
    return total, td_error.detach(), metrics | {"losses/value": value_loss, "losses/total": total}


def learn(
    args: Args, run: RunState, group: LearnerGroup, learner: LearnerState, drawn: Batch, guard: NonFiniteFilter
) -> None:
    """Take one gradient step on a batch, and update its transitions' priorities to their absolute TD errors."""
    net, target_net, optimizer, replay = learner.net, learner.target_net, learner.optimizer, learner.replay
    batch = drawn.to(next(net.parameters()).device)
    importance_exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
    smallest = group.all_gather(batch.probability.min()[None]).min()
    importance = importance_weights(batch.probability, importance_exponent, smallest)
    if args.normalize_obs:
        update_norm(run, net.norm, group.all_gather(apex.obs_for_stats(batch)), "the replay")
    total, td_error, metrics = loss(args, learner, batch, importance)
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    group.all_reduce_gradients(net, total)
    metrics["losses/grad_norm"] = norm = apex.clip_gradients(optimizer, args.max_grad_norm)
    # The Huber loss has a finite gradient even where a TD error is inf, so the check includes the loss.
    if guard.check(norm + total.detach(), "the learners", f"gradient {run.updates + 1}"):
        optimizer.step()
        run.record_update(metrics, samples=args.batch_size * group.size)
        if run.updates % args.target_period == 0:
            apex.move_target(target_net, net, args.target_rate)
        replay.update(drawn.ids, td_error.abs().cpu())


def train(args: Args, run: RunState, group: LearnerGroup, learner: LearnerState) -> None:
    """Train one learner: fill a replay from its own actors, take every gradient step together with the others."""
    net, replay = learner.net, learner.replay
    group.broadcast_state(net, learner.target_net, learner.optimizer)
    weights = Weights(net, acting_dtype(args.precision, net), untrained=run.updates == 0)
    states = ResumeStates(args, apex.actor_layout(args, learner), start=run.steps, group=group)
    limiter = RateLimiter(args.replay_ratio, args.learning_starts)
    if args.save_replay:  # without it, actors start new games when the run is resumed
        run.keep(actors=states, weights=weights, limiter=limiter)
    block_guard = NonFiniteFilter(run, "blocks_not_finite", in_a_row=apex.bad_blocks_in_a_row(args))
    grad_guard = NonFiniteFilter(run, "grads_not_finite")
    batches = Prefetch(replay, args.batch_size, ahead=0 if args.deterministic else args.prefetch, pin=args.cuda)
    apex.make_room(args, replay)  # a restored replay may be full
    prepare = apex.prepare_successor(args, replay, states.own)
    start = processes(actor, args, *learner.memory, weights, states)
    with batches, Actors(start, weights, states, run, prepare) as actors:
        for filled in actors.rounds():  # one block, or in a deterministic run one of every actor, in order
            stats = apex.ingest_blocks(args, learner, filled, weights.version)
            recorded = actors.record_round(filled, stats, block_guard, replay.size)
            limiter.insert(sum(block.steps for block in stats), recorded.replay_sizes)
            updates_before = run.updates
            for batch in limiter.allowed(batches, run):
                with run.timing("learning"):
                    learn(args, run, group, learner, batch, grad_guard)
            if run.updates > updates_before:
                with run.timing("publishing"):
                    weights.publish(net)
            run.end_round()
            if run.should_stop():  # the replay is saved as it is now: actors may not append to it
                break
            apex.make_room(args, replay, [worker for worker, _, _ in filled])


def peer(group: LearnerGroup, args: Args, steps: int, updates: int) -> None:
    """Learner process of rank 1, 2, ..."""
    learner = apex.build_learner(args, ALGORITHMS[args.algo], group.rank)
    train(args, ReplicaRun(args, group.rank, steps, updates), group, learner)


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    learner = apex.build_learner(args, ALGORITHMS[args.algo])
    with apex.make_run(args, learner) as run, Learners.of(run, peer) as group:
        apex.add_replay_metrics(run, args, learner.replay)
        train(args, run, group, learner)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
