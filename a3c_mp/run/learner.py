"""A learner: nets and optimizer, the actors that send it data, and the rounds in which it takes that data.

What every message needs happens here: it is checked for NaN and inf and counted, with its policy lag; what its actor's
successor needs is kept; when a round ends, new weights are published and slots go back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a3c_mp.data.actor import Memory, run_actor
from a3c_mp.data.episodes import Episode
from a3c_mp.data.resume_states import ActorLayout, ActorReport, ResumeStates
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.obs_stats import FAR
from a3c_mp.processes.learner_group import LearnerGroup, Stateful
from a3c_mp.processes.pool import Filled, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Workers
from a3c_mp.run.progress import BAD_IN_A_ROW, NonFiniteFilter, RunState, count


class Acting(NamedTuple):
    """Device and dtype of the nets of actors, and a line for the log about how weights reach them."""

    device: torch.device
    dtype: torch.dtype
    note: str = ""


@dataclass
class Setup:
    """What an algorithm makes before its run begins, in the process of each learner."""

    net: Any  # an `ActorCritic`, `QNet` or `DDPGNet`
    optimizer: torch.optim.Optimizer
    slots: Slots  # shared memory for what actors send
    layout: ActorLayout  # of the states that deterministic actors send
    acting: Acting  # device and dtype that actors compute in
    weights_dtype: torch.dtype | None = None  # of the weights that actors load; None: that of `acting`
    message: str = "rollout"  # what a slot holds: in log lines, and in the name of the counter of those with NaN or inf
    bad_in_a_row: int = BAD_IN_A_ROW  # messages with NaN or inf in a row, from one actor, that end a run
    saved: dict[str, Stateful] = field(default_factory=dict)  # in all checkpoints, besides net, optimizer and progress
    kept: dict[str, Stateful] | None = field(default_factory=dict)
    """further state for an exact resume, in deterministic checkpoints; None: an exact resume is not possible"""
    make_policy: Any = None
    """for evaluations (`evaluate.MakePolicy`); None: as for an actor-critic net"""
    samples_per_update: int = 0  # of each learner, where the metrics have samples a second
    more: Any = None  # shared with actors, besides slots and weights; see `Memory.more`
    return_stats: Any = None  # a `ReturnStats`, also in `saved`

    def begin(self, learner: Learner) -> None:
        """Called before actors start; `saved` is restored by then, but not `kept`, weights and states of actors."""

    def rounds(self, learner: Learner) -> Any:
        """Iterate over what the chapter learns from."""
        raise NotImplementedError


class Processes:
    """The carrier of one machine: spawned processes share memory with their learner. Others have these two methods."""

    def share(self, net: nn.Module, acting: Acting, untrained: bool) -> Weights:
        return Weights(net, acting.dtype, untrained, acting.device)

    def start(self, make_actor: Callable[..., Any], args: Any, memory: Memory, **pool: Any) -> Any:
        return Workers(run_actor, args=(make_actor, args, memory), **pool)


class MessageStats(NamedTuple):
    """What is counted of one message of an actor."""

    steps: int  # agent steps in it
    episodes: list[Episode] | None  # of the rollout; None if an earlier message of the same rollout had them
    policy_lag: int  # versions
    finite: bool | None  # whether all of it can be learned from; None if it held nothing new
    rewards: tuple[Tensor, Tensor] | None = None  # raw rewards [T, B] and where games end, bool, of its steps


class Round(NamedTuple):
    """A round of all learners, as `Learner.record` recorded it."""

    finite: bool  # whether all of its messages can be learned from
    replay_sizes: list[int]  # transitions in the replay of each learner, by rank; 0 without a replay


class Learner:
    """A learner and its supervised actors; used in a `with` block.

    `run` counts, logs, saves and says when to stop; `make_actor` is the chapter's `actor(channel, args)`; the learners
    of a `group` take every step together; a `carrier` starts actors and carries what they send.
    """

    def __init__(
        self, args: Any, run: RunState, setup: Setup, make_actor: Callable[..., Any],
        group: LearnerGroup | None = None, carrier: Any = None,
    ):  # fmt: skip
        self.args, self.run, self.rng = args, run, run.rng
        self.setup: Any = setup
        self.group = group or LearnerGroup()
        self.carrier: Any = carrier or Processes()
        self.net, self.optimizer = setup.net, setup.optimizer
        self.device = next(self.net.parameters()).device
        self.group.broadcast_state(setup.net, setup.optimizer, *setup.saved.values())
        self._set_reward_scale()
        acting = setup.acting._replace(dtype=setup.weights_dtype or setup.acting.dtype)
        if acting.note and self.group.rank == 0:
            run.log.info(acting.note)
        self.weights = self.carrier.share(setup.net, acting, untrained=run.updates == 0)
        self.states = ResumeStates(args, setup.layout, start=run.steps, group=self.group)
        self.own = self.states.own  # numbers of this learner's actors in the whole run
        self.on_event: Callable[[WorkerEvent], None] = lambda event: None  # for the algorithm, besides the run's
        setup.begin(self)
        if setup.kept is not None:
            run.keep(actors=self.states, weights=self.weights, **setup.kept)
            self.group.broadcast_state(self.states, self.weights)
        if setup.return_stats is not None and self.states.start == run.steps:
            setup.return_stats.open.zero_()  # actors play new games
        self._data_filter = NonFiniteFilter(run, f"{setup.message}s_not_finite", setup.bad_in_a_row)
        self.gradient_filter = NonFiniteFilter(run, "gradients_not_finite")
        self.settle: Callable[[], None] = lambda: None  # counts what a `GraphStep` has skipped
        self._events: list[WorkerEvent] = []  # of a group of learners, until the next `record`
        self._reports: list[ActorReport] = []
        self.memory = Memory(setup.slots, self.weights, self.states, setup.acting.dtype, args.in_order, setup.more)
        slots = setup.layout.slots_per_actor
        options = WorkerOptions(
            role="actor", slots_per_worker=slots, max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
            in_order=args.in_order, versions=self.weights.versions_in_flight(slots), first_actor=self.own.start,
        )  # fmt: skip
        self.pool: Any = self.carrier.start(
            make_actor, args, self.memory, num_workers=len(self.own), states=self.states, options=options,
            on_restart=self.report,
        )  # fmt: skip

    def __enter__(self) -> Learner:
        with ExitStack() as stack:
            stack.callback(lambda: [*map(self.run.on_restart, self._events)])  # pending ones, also when the run fails
            stack.enter_context(self.pool)
            self._leaving = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._leaving.__exit__(*exc)

    # ---- what a chapter calls

    def rounds(self) -> Any:
        """Iterate over what the chapter learns from: finite, counted; when a round ends, new weights are published."""
        return self.setup.rounds(self)

    @property
    def steps(self) -> int:
        return self.run.steps

    @property
    def updates(self) -> int:
        return self.run.updates

    def take_step(self, gradients: Callable[..., Metrics], args: Any, loss: Any, *batch: Any) -> Metrics | None:
        """Take a step with the gradients that `gradients(args, learner, loss, *batch)` leaves, and return its metrics.

        A gradient or loss that is not finite is counted and skipped: it returns None. A `GraphStep` skips by itself,
        and always returns metrics, which the next one overwrites. Raises TrainingError at five in a row.
        """
        if self._graph_step is not None:
            return self._graph_step.take(gradients, args, loss, *batch)
        metrics = gradients(args, self, loss, *batch)
        source = "the learner" if self.group.size == 1 else "the learners"
        value = metrics["losses/grad_norm"] + metrics["losses/total"]
        if not self.gradient_filter.check(value, source, f"gradient {self.updates + 1}"):
            return None
        self.optimizer.step()
        self.record_update(metrics)
        return metrics

    @cached_property
    def _graph_step(self) -> Any:
        """A `GraphStep`; None on the CPU, with optimizers other than fused Adam, with other learners to wait for."""
        is_fused_adam = isinstance(self.optimizer, torch.optim.Adam) and self.optimizer.defaults["fused"]
        if self.device.type == "cpu" or not self.args.cuda_graph or not is_fused_adam or self.group.size > 1:
            return None
        from a3c_mp.run.graph_step import GraphStep  # here, as most runs have no GPU

        return GraphStep(self)

    def record_update(self, metrics: Metrics) -> None:
        self.run.record_update(metrics, self.setup.samples_per_update * self.group.size)

    # ---- what a round is made of

    def take(self, size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots: `size` as they arrive, or in order one of every actor; none at the end."""
        with self.run.timing("waiting"):
            filled = self.pool.take(self.run.should_stop, size)
        self._reports = self.states.read(filled)
        if self.group.size == 1:  # else `record` does: a lost learner must not leave a round half recorded
            self.states.advance(self._reports)
        return filled

    def record(self, filled: Sequence[Filled], stats: Sequence[MessageStats], replay_size: int = 0) -> Round:
        """Record steps and episodes of messages, with those of other learners: all keep equal counters.

        Raises TrainingError if one actor has sent several messages with NaN or inf in a row.
        """
        named = [(self.own[message.worker], self._copied(each)) for message, each in zip(filled, stats, strict=True)]
        reports = self._reports if self.group.size > 1 else []
        with self.run.timing("waiting"):
            everything = self.group.all_gather_object((named, self._events, reports, replay_size))
        verdicts = []
        for rank, (their_stats, their_events, their_reports, _) in enumerate(everything):
            for event in their_events:
                self._record_event(event)
                if self.args.deterministic and not event.replaced and rank != self.group.rank and event.actor >= 0:
                    self.states.forget(event.actor)
            for actor, (steps, episodes, policy_lag, finite, rewards) in their_stats:
                self.run.record_rollout(steps, episodes, actor, policy_lag)
                if rewards and rewards[0].float().isfinite().all():
                    self.setup.return_stats.update(actor, *rewards)
                elif rewards:
                    self.setup.return_stats.forget(actor)
                if finite is not None:
                    name = f"{self.args.actor_name} {actor}"
                    verdicts.append(self._data_filter.check(finite, name, f"{self.setup.message} from {name}"))
                    self.run.progress.has_data |= verdicts[-1]
            self.states.advance(their_reports)
        self._events = []
        if self.args.reward_scale is None:
            self._set_reward_scale()
            self.run.record_metrics({"values/reward_scale": self.reward_scale})
        return Round(all(verdicts), [size for *_, size in everything])

    def _copied(self, stats: MessageStats) -> MessageStats:
        """With copies of the rewards (a pickled view takes all slots along), or without if their scale is fixed."""
        if self.args.reward_scale is not None or stats.rewards is None:
            return stats._replace(rewards=None)
        reward, done = stats.rewards
        return stats._replace(rewards=(reward.cpu().clone(), done.cpu().clone()))

    def _set_reward_scale(self) -> None:
        fixed = self.args.reward_scale
        self.reward_scale: float = self.setup.return_stats.scale() if fixed is None else fixed
        self.net.reward_scale.fill_(self.reward_scale)

    def update_norm(self, obs: Tensor, source: str) -> None:
        """Update the statistics of observations with these [N, *obs_shape], of all learners; count what is far off."""
        if self.args.normalize_obs:
            number = self.net.norm.update(self.group.all_gather(obs))
            what = f"values of observations from {source} more than {FAR:g} standard deviations from the mean"
            count(self.run, "obs_values_far", number, f"{what}; left out of it")

    def end_round(self, publish: bool = True) -> bool:
        """Publish the weights; write metrics and checkpoints that are due. Returns whether the run goes on."""
        if publish:
            with self.run.timing("publishing"):
                self.weights.publish(self.net)  # waits for the GPU: after this the slots have been read
            self.settle()
        self.run.end_round()
        return not self.run.should_stop()

    def release(self, filled: Sequence[Filled]) -> None:
        """Give slots back to their actors, to be filled with the newest weights."""
        self.pool.release(filled, self.weights.version)

    def lag(self, version: int) -> int:
        """How many versions of the weights are newer than the one that an actor used."""
        return self.weights.version - version

    def report(self, event: WorkerEvent) -> None:
        """Record an event, with several learners at the end of the round, when all of them do."""
        if self.group.size > 1:
            self._events.append(event)
        else:
            self._record_event(event)
        self.on_event(event)

    def _record_event(self, event: WorkerEvent) -> None:
        self.run.on_restart(event)
        stats, is_rebuilt = self.setup.return_stats, self.args.deterministic and event.replaced
        if stats is not None and event.actor >= 0 and not is_rebuilt:
            stats.forget(event.actor)
