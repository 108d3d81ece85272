"""Chapter 7's settings, checks and what connects its algorithms to a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from a3c_mp.algorithms import apex, impala
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.session import MIB, Needs, Session, check_installed
from a3c_mp.cluster.transport import Inbox, Packer
from a3c_mp.config import CommonArgs
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.errors import ConfigError
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.actors import Actors
from a3c_mp.run.run import Run
from wrappers import is_atari

HELD = 2
"""results beside those in flight that may lie in the object store: one that is copied, one that is freed late"""


@dataclass(frozen=True)
class RayArgs(CommonArgs):
    """Settings of the connection to a Ray cluster."""

    chapter = "ray"

    address: str | None = None
    """join a running Ray cluster: HOST:PORT of its head, or auto on one of its machines; default: one of its own"""
    insecure_cluster: bool = False
    """with --address: join a cluster that accepts any token"""


@dataclass(frozen=True)
class ImpalaArgs(impala.Args, RayArgs):
    """Settings of IMPALA on Ray."""

    chapter = "ray"

    algo: Literal["impala", "dqn"] = "impala"
    """impala: actors send unrolls; dqn: actors fill replay shards"""


PRESETS = impala.PRESETS


def check(args: ImpalaArgs) -> None:
    """Raise ConfigError for settings that contradict each other, and for a machine without Ray."""
    check_installed()
    for flag, value in (("num-learners", args.num_learners - 1), ("force-lag", getattr(args, "force_lag", 0))):
        if value:
            raise ConfigError(flag, value + (flag == "num-learners"), "not on Ray", "leave it out, or use chapter 4")


def make_packer(args: ImpalaArgs, slots: Slots) -> Packer:
    """The packer of a run: stacked Atari observations travel as single frames."""
    return Packer(slots.spec, apex.FRAMES if is_atari(args.env_id) else 1)


def needs_of(args: ImpalaArgs, packer: Packer, weight_bytes: int) -> Needs:
    """What a run needs of a cluster of its own."""
    rollouts = args.num_actors * args.slots_per_actor + HELD
    return Needs(args.num_actors, rollouts * (packer.nbytes + MIB) + 4 * weight_bytes)


class OnRay:
    """The connection of a run to a Ray cluster, in a `with` block.

    Args:
        args: of the chapter.
        run: of the trainer.
        learner: of the algorithm.
    """

    def __init__(self, args: ImpalaArgs, run: Run, learner: impala.LearnerState):
        self.args, self.run, self.learner = args, run, learner
        self.packer = make_packer(args, learner.slots)
        weight_bytes = sum(4 * tensor.numel() for tensor in learner.net.state_dict().values())
        self.session = Session(args.address, needs_of(args, self.packer, weight_bytes))

    def __enter__(self) -> OnRay:
        self.session.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.session.__exit__(*exc)

    def start_actors(self, target: Callable[..., Any], weights: Weights, states: ActorStates, args: tuple) -> Actors:
        """Start the actors of a run, as a fleet."""
        inbox = Inbox(self.packer, self.learner.slots, states.slots)
        fleet = partial(Fleet, self.session, target, (self.args, self.packer, *args), inbox)
        actors = Actors(None, (), weights, states, self.run, start=fleet)
        workers = actors.workers
        assert isinstance(workers, Fleet)
        self.run.metrics.gauges |= {
            "cluster/actors": lambda: float(workers.running),
            "cluster/nodes": lambda: float(self.session.num_nodes),
        }
        return actors


def state_of(args: ImpalaArgs, fields: Callable[..., dict[str, Any]], *of: Any) -> dict[str, Any]:
    """What a deterministic actor sends of its state: `fields(*of)`; nothing in other runs."""
    if not args.deterministic:
        return {}
    return {name: torch.as_tensor(value).numpy() for name, value in fields(*of).items()}
