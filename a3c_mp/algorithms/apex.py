"""Ape-X: setup and rounds of a learner, rate limiter, exploration ladder, target network, for all its algorithms."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from a3c_mp.algorithms.apex_settings import Args
from a3c_mp.data.episodes import episodes_at
from a3c_mp.data.resume_states import ActorLayout
from a3c_mp.data.transitions import block_spec
from a3c_mp.errors import ConfigError
from a3c_mp.maths.return_stats import ReturnStats
from a3c_mp.maths.schedules import set_learning_rate
from a3c_mp.processes.pool import Filled, WorkerEvent
from a3c_mp.processes.slots import GIB, Slots, free_memory
from a3c_mp.replay import Batch, Prefetch, Replay, Shards, writer_state_spec
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.preflight import check_learners, check_memory, check_replay_memory, probe_env, set_up_torch
from a3c_mp.run.progress import BAD_IN_A_ROW, RunState
from a3c_mp.wrappers import frames_of, is_atari

NORM_PERIOD = 16  # updates between two batches that update the observation statistics: enough samples, at low cost
FRAMES = 4  # of a stacked Atari observation, as a rule


def ladder(base: float, exponent: float, actor: int, num_envs: int, num_actors: int) -> np.ndarray:
    """Return the exploration ladder of one actor's environments: base ** (1 + exponent * i / (N - 1)), [B].

    i counts the N environments of all actors. Horgan et al. 2018, section 4.1, have one value for each actor instead.
    """
    i = actor * num_envs + np.arange(num_envs)
    return base ** (1 + exponent * i / max(num_actors * num_envs - 1, 1))


@torch.no_grad()
def move_target(target_net: nn.Module, net: nn.Module, rate: float) -> None:
    """Update the target network by Polyak averaging: target += rate (online - target).

    Of parameters and of buffers that are saved, each once, under whatever names: other buffers are constants of a net
    of the user's own, such as indices.
    """
    target, online = ([*dict.fromkeys(each.state_dict(keep_vars=True).values())] for each in (target_net, net))
    torch._foreach_lerp_(target, online, rate)


class RateLimiter:
    """Rate limiter: a fixed ratio of samples to inserts (Cassirer et al. 2021, "Reverb", section 3.3).

    Sampling starts with `min_size_to_sample` transitions in the replays of all learners together, or once `capacity`
    steps have been inserted into each since one was empty: truncated games of a few steps take two rows for a
    transition, and fill a replay with fewer transitions.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, capacity: int):
        self.samples_per_insert, self.min_size_to_sample = samples_per_insert, min_size_to_sample
        self.capacity, self.inserted, self.has_started = capacity, 0, False
        self.samples_allowed = 0.0

    def insert(self, steps: int, sizes: Sequence[int]) -> None:
        """Count inserted steps, once all replays, of these `sizes`, hold enough or are full, and none is empty."""
        self.inserted = self.inserted + steps if min(sizes) > 0 else 0
        self.has_started = sum(sizes) >= self.min_size_to_sample or self.inserted >= self.capacity
        if self.has_started and min(sizes) > 0:
            self.samples_allowed += self.samples_per_insert * steps

    def allowed(self, batches: Any, run: RunState) -> Iterator[Batch]:
        """Yield as many batches as the ratio allows; fewer if the run should stop, unless it is deterministic."""
        while self.samples_allowed >= batches.batch_size and (run.args.deterministic or not run.should_stop()):
            with run.timing("drawing"):
                batch = batches.next()
            if batch is None:  # replay shards of a cluster have none at the moment
                return
            yield batch
            self.samples_allowed -= batches.batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"allowed": self.samples_allowed, "inserted": self.inserted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples_allowed, self.inserted = state["allowed"], state["inserted"]


class ApexSetup(Setup):
    """What a learner of Ape-X makes before a run: online and target net, optimizer, replay, slots for its actors.

    `algo` is the module `dqn`, `ddpg` or `td3`. Raises ConfigError where environment, settings or memory do not fit.
    """

    def __init__(self, args: Any, algo: Any, rank: int = 0):
        from a3c_mp.run.gpu import choose_acting  # here, as actors need none of it

        check_learners(args)
        if getattr(args, "rollout_fields", None):
            raise ConfigError("rollout_fields", "", "actors of this chapter send no rollouts", "leave it out")
        obs_space, action_space = probe_env(args.env_id, algo.ACTIONS)
        check_sizes(args)
        device = set_up_torch(args, rank)
        stored_actions, policy_state = algo.stored(args, action_space)
        shards = self.make_replay(args, obs_space, stored_actions, rank)
        if rank == 0 and ":" not in args.net:  # a net of the user's own may not be made without memory
            with torch.device("meta"):
                check_memory(args, algo.make_net(obs_space, action_space, args.net_spec))
        net = algo.make_net(obs_space, action_space, args.net_spec).to(device)
        if not args.normalize_obs:
            net.norm.turn_off()
        self.target_net = copy.deepcopy(net).requires_grad_(False)
        num_slots = args.num_actors // args.num_learners * args.blocks_in_flight
        try:
            slots = Slots(block_spec(args.block_length, args.num_envs), num_slots)
        except MemoryError as error:
            raise ConfigError("block-length", args.block_length, str(error), "lower it, or --num-envs") from error
        state = writer_state_spec(args.num_envs, args.n_step) | policy_state
        layout = ActorLayout(action_space, args.block_length, state, args.blocks_in_flight)
        super().__init__(net, algo.make_optimizer(args, net), slots, layout, choose_acting(args, net))
        self.message, self.more = "block", shards
        # One bad reward is part of the n-step returns of several steps, so it can spoil more than one block.
        self.bad_in_a_row = BAD_IN_A_ROW - 1 + -(-args.n_step // args.block_length)
        self.samples_per_update, self.make_policy = args.batch_size, algo.make_policy
        self.limiter = RateLimiter(args.replay_ratio, args.learning_starts, args.replay_size // args.num_learners)
        self.return_stats = ReturnStats(args.gamma, args.num_actors, args.num_envs, args.reward_clip)
        self.saved = {"obs_stats": net.norm.stats, "return_stats": self.return_stats, "target_net": self.target_net}
        self.saved |= {"replay": self.replay} if args.save_replay else {}
        # Without the replay, actors start new games when the run is resumed.
        self.kept = {"limiter": self.limiter} if args.save_replay else None

    def make_replay(self, args: Any, obs_space: gymnasium.Space, actions: gymnasium.Space, rank: int) -> Any:
        """Allocate the replay, in equal parts for the environments of the learner's actors; return what they share."""
        num_actors = args.num_actors // args.num_learners
        sizes = num_actors, args.num_envs, args.rows_per_lane, obs_space, actions, stacked_frames(args.env_id)
        if rank == 0:
            check_replay_memory(args.replay_size, args.local_learners * Shards.bytes_needed(*sizes))
        try:
            shards = Shards(*sizes)
        except MemoryError as error:
            raise ConfigError("replay-size", args.replay_size, str(error), "lower it") from error
        self.replay: Any = Replay(shards, args.priority_exponent, args.seed + rank)
        return shards

    def begin(self, learner: Any) -> None:
        args, run, replay, shards = learner.args, learner.run, self.replay, self.more
        learner.on_event = lambda event: self._prepare_successor(learner, event)
        self.make_room(args, range(shards.num_shards))  # a restored replay may be full
        if learner.group.rank == 0:  # the others have about as many transitions, and no metrics
            why = "with several learners" if args.num_learners > 1 else "without --save-replay"
            show_replay(run, args, self.limiter, lambda: args.num_learners * replay.size, why)
            capacity = shards.num_lanes * shards.rows
            run.metrics.gauges |= {
                "replay/size": lambda: replay.size,
                "replay/dropped_priorities": lambda: replay.dropped,
                "memory/replay_gib": lambda: shards.slots.slot_bytes * min(1.0, shards.written.sum() / capacity) / GIB,
                "memory/free_gib": lambda: free_memory() / GIB,
            }

    def rounds(self, learner: Learner) -> Iterator[Batch]:
        """Yield the batches that are due after each round: one block of steps, or in order one of every actor."""
        with self.sampler(learner.args) as batches:
            while filled := learner.take():
                stats = self.ingest(learner, filled)
                recorded = learner.record(filled, stats, self.replay.size)
                set_learning_rate(learner)
                self.limiter.insert(sum(block.steps for block in stats), recorded.replay_sizes)
                updates = learner.updates
                for batch in self.limiter.allowed(batches, learner.run):
                    with learner.run.timing("learning"):
                        batch = batch.to(learner.device)
                        if learner.updates % NORM_PERIOD == 0:
                            learner.update_norm(batch.obs, "the replay")
                            if learner.updates == 0:  # its own follow slowly, and begin where nothing was known
                                self.target_net.norm.load_state_dict(learner.net.norm.state_dict())
                        yield batch
                if not learner.end_round(publish=learner.updates > updates):
                    return  # the replay is saved as it is now: actors may not append to it
                self.make_room(learner.args, [worker for worker, _, _ in filled])
                learner.release(filled)

    def sampler(self, args: Args) -> AbstractContextManager[Any]:
        """Return what draws batches, ahead of their use unless the run is deterministic."""
        return Prefetch(self.replay, args.batch_size, 0 if args.deterministic else args.prefetch, pin=args.cuda)

    def make_room(self, args: Args, shards: Iterable[int]) -> None:
        """Retire the rows that blocks in flight may overwrite."""
        for shard in shards:
            self.replay.make_room(shard, args.rows_in_flight)

    def ingest(self, learner: Learner, filled: Sequence[Filled]) -> list[MessageStats]:
        """Ingest a round of blocks, but no transition whose first priority is not finite; return their statistics."""
        stats = []
        for shard, slot, version in filled:
            rejected_before = self.replay.rejected
            accepted = self.replay.ingest(shard)
            rejected = self.replay.rejected - rejected_before
            # None if nothing is new, because the rows of this block came with the previous one.
            stats.append(self.stats_of(learner, slot, version, rejected == 0 if accepted or rejected else None))
        return stats

    def stats_of(self, learner: Learner, slot: int, version: int, finite: bool | None) -> MessageStats:
        block = self.slots[slot]
        rewards, lag = (block["reward"], block["done"]), learner.lag(version)
        episodes = episodes_at(block["done"], block["episode_return"], block["episode_length"])
        return MessageStats(block["done"].numel(), episodes, lag, finite, rewards)

    def _prepare_successor(self, learner: Learner, event: WorkerEvent) -> None:
        """Prepare the shard of a dead actor for its successor.

        A deterministic one writes the lost block again; any other continues after the rows already written of it.
        """
        if not learner.args.deterministic:
            self.make_room(learner.args, range(self.more.num_shards))
        elif event.replaced:
            self.replay.roll_back(event.actor - learner.own.start)


def check_sizes(args: Args) -> None:
    """Raise ConfigError for sizes of the replay, or learning rates, that are inconsistent."""
    if args.save_replay and args.num_learners > 1:
        why = "checkpoints hold the replay of one learner, the others would start with an empty one"
        raise ConfigError("save-replay", args.save_replay, why, "leave it out, or use --num-learners 1")
    rows, least = args.rows_per_lane, 4 * args.rows_in_flight + args.n_step + max(FRAMES, stacked_frames(args.env_id))
    if rows < least:
        why = f"each of {args.num_actors} * {args.num_envs} environments has {rows} steps in it, {least} are needed"
        raise ConfigError("replay-size", args.replay_size, why, "raise it, or lower --num-envs or --block-length")
    if args.learning_rate_end is not None and not args.learning_rate:
        why, fix = "a learning rate of 0 stays 0", "raise --learning-rate"
        raise ConfigError("learning-rate-end", args.learning_rate_end, why, fix)
    why = f"the replay has room for {args.replay_size}"
    if args.batch_size > args.replay_size:
        raise ConfigError("batch-size", args.batch_size, why, "lower it, or raise --replay-size")
    if args.learning_starts > args.replay_size // 2:
        fix = "use half of it at most, or raise --replay-size"
        raise ConfigError("learning-starts", args.learning_starts, why, fix)


def stacked_frames(env_id: str) -> int:
    """Return the frames of an observation of which only the newest is stored; 1: all of it."""
    return frames_of(env_id)[0] if is_atari(env_id) else 1


def show_replay(run: Any, args: Args, limiter: RateLimiter, size: Callable[[], int], why: str) -> None:
    """Have progress lines say how many transitions the replay has until learning starts.

    Log it if a resumed run has to fill its replay again, and `why` a deterministic one then ends differently.
    """
    missing = args.learning_starts - (size() if args.resume else 0)
    steps = args.total_steps - run.steps - max(missing, 0)
    updates = int(args.replay_ratio * steps / args.batch_size / args.num_learners)
    if updates > 0 and not args.resume and (args.target_rate == 0 or updates < args.target_period):
        fix = "lower --target-period" if args.target_rate else "raise --target-rate"
        run.log.warning(f"the target net stays as it is in all {updates:,} updates: {fix}")
    if updates <= 0:
        run.log.warning("the run ends before its next update: lower --learning-starts, or raise --total-steps")
    run.metrics.phase = lambda: "" if limiter.has_started else f"collecting {size():,}/{args.learning_starts:,}"
    if args.resume and not size():
        run.log.info(f"the replay is empty: learning starts once it holds {args.learning_starts:,} transitions")
        if args.deterministic:
            run.log.warning(f"{why} a resumed run differs from one that was never interrupted")
