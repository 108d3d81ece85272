"""Settings: the flags that all chapters share, how they are parsed and checked, and the errors a user can mend."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from a3c_mp.errors import ConfigError


@dataclass(frozen=True)
class CommonArgs:
    env_id: str = "PongNoFrameskip-v4"
    """gymnasium id; module:Env-v0 imports the module first"""
    cuda: bool = False
    """keep the nets on the GPU that torch calls cuda:0"""
    num_actors: Annotated[int, Between(1, 1024)] = 2
    """actor processes"""
    num_envs: Annotated[int, Between(1, 4096)] = 32
    """environments in each actor (B)"""
    total_steps: Count = 10_000_000
    """stop after this many agent steps"""
    stop_return: float | None = None
    """solved when the mean return of the last 100 games (at least 20) reaches this"""
    max_seconds: NonNegative | None = None
    """stop this long after the start, or after the resumption (s)"""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 1
    """seed of weights, environments and sampling"""
    run_name: str | None = None
    """folder of the run inside runs-dir; the default is made of chapter, environment, seed and time"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    resume: Path | None = None
    """run folder to continue, with its own settings except for flags given now"""
    checkpoint_seconds: Annotated[float, Between(0.1)] = 60.0
    """time between checkpoints (s)"""
    checkpoint_steps: Count | None = None
    """also write a checkpoint each time this many agent steps have passed"""
    deterministic: bool = False
    """fixed order of rollouts and weights: two runs with one seed end bit-identical"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number format of nets on images (on vectors: fp32); auto takes bf16 where the hardware has it"""
    learner_threads: Annotated[int, Between(1, 1024)] = 1
    """CPU threads of the learner"""
    max_restarts: Annotated[int, Between(0)] = 5
    """how many dead or hanging actors each learner replaces before the run fails"""
    hang_seconds: Annotated[float, Between(1)] = 60.0
    """an actor that takes no step for so long is killed and replaced (s); until its first step it has 120"""

    @property
    def in_order(self) -> bool:
        """Whether the learner takes one message of every actor in each round, in the order of the actors."""
        return self.deterministic


@dataclass(frozen=True)
class LearningArgs(CommonArgs):
    """What is learned from, in every chapter."""

    gamma: Fraction = 0.99
    """discount for each agent step"""
    reward_clip: bool = True
    """learn from the sign of rewards, by default on Atari games only; the returns shown stay raw"""
    reward_scale: NonNegative = 1.0
    """what rewards are multiplied by for learning, after clipping"""
    life_loss_terminal: bool = True
    """a lost life ends the return, though not the game"""
    normalize_obs: bool = True
    """subtract from every pixel or input its running mean and divide by its deviation"""


@dataclass(frozen=True)
class Between:
    """The values a numeric flag may take, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:g} or more"
        return f"between {self.low:g} and {self.high:g}"


Count = Annotated[int, Between(1)]


NonNegative = Annotated[float, Between(0)]


Fraction = Annotated[float, Between(0, 1)]


def flag_name(field: str) -> str:
    return field.replace("_", "-")


def check_ranges(args: object) -> None:
    """Raise ConfigError for the first field outside the `Between` of its annotation, or not finite."""
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigError(flag_name(name), value, "must be a finite number")
        for bounds in bounds_of(hint):
            if not bounds.low <= value <= bounds.high:
                raise ConfigError(flag_name(name), value, f"must be {bounds}")


def bounds_of(hint: Any) -> list[Between]:
    """The `Between` of an annotation, also inside `X | None`."""
    found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Between)]
    return found + [bounds for inner in typing.get_args(hint) for bounds in bounds_of(inner)]
