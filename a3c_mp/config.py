"""Settings: the flags that all chapters share, and the check of ranges.

A chapter's `Args` inherits the groups that it is made of (`class Args(settings.Args, ReplayArgs)` in chapter 6). A
group is a frozen dataclass: a field is a flag, its annotation the range, the docstring under it the help text.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from a3c_mp.errors import ConfigError

FORMAT = 3  # of checkpoints and `config.json`; a run of another format cannot be resumed
PLACE = {"resume", "resume_or_start", "run_name", "runs_dir"}  # settings that say where a run is


def check_name(name: str) -> None:
    """Raise ConfigError for the name of a run that is no plain folder name."""
    if not name.strip(". ") or "/" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ConfigError("run-name", name, "must be a plain folder name", "choose a short one without / or ..")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds a checkpoint, even one that cannot be read: only a run without any may start again."""
    return any((folder / "checkpoints").glob(f"step_{12 * '[0-9]'}.json"))


def format_error(path: Path, form: object) -> str | None:
    """Why a checkpoint or a `config.json` with this "format" (None: without) cannot be used; None if it can."""
    if form == FORMAT:
        return None
    writer = "a3c-mp 0.1" if form in (None, 1) else "another version of a3c-mp"
    return f"{path} was written by {writer}, in format {form or 1}; this version reads format {FORMAT}"


@dataclass(frozen=True)
class CommonArgs:
    """Settings of every chapter."""

    chapter = ""  # without an annotation it is no flag: what the algorithm's name begins with in config.json
    actors_flag = "num-actors"  # the flag that says how many actors there are, for error messages
    actor_name = "actor"  # what the chapter calls one, in messages
    actors_learn = False  # whether actors compute gradients
    games_explore = False  # whether all games of the mean return have exploration, which evaluations do not
    has_fitness = False  # whether games that evaluate each generation are what counts, not those of training
    evaluates_elsewhere = False  # whether the chapter has an evaluator of its own
    continuous: ClassVar[Mapping[str, Any]] = {}  # defaults without a preset, for environments with continuous actions;
    # `continuous_NAME` takes its place with `--algo NAME`
    vectors: ClassVar[Mapping[str, Any]] = {}  # defaults without a preset, for others whose observations are vectors
    images: ClassVar[Mapping[str, Any]] = {}  # defaults for Atari, under its presets, and without a preset for images
    fixed: ClassVar[tuple[str, ...]] = ("normalize_obs",)  # what a resumed run cannot change: its nets depend on it

    env_id: str = "PongNoFrameskip-v4"
    """gymnasium environment id; module:Env-v0 imports the module first, also from the current folder"""
    env_kwargs: tuple[str, ...] = ()
    """keyword arguments of the environment, name=value ...; they become part of its id, Env-v0?name=value; braces
    have the numbers of actor and environment: port={9000+100*actor+env}"""
    wrapper: tuple[str, ...] = ()
    """gymnasium wrappers around the environment, module:Class[,name=value] ..., the innermost first; they become part
    of its id, as the following three do"""
    obs_keys: tuple[str, ...] = ()
    """parts of Dict observations that are used; default: all but texts"""
    frame_size: Annotated[int, Between(36, 1024)] | None = None
    """scale images to this height and width (pixels); default: as they are, Atari's 84"""
    frame_stack: Annotated[int, Between(1, 64)] | None = None
    """images of the last steps in an observation, as its channels; default: 1, Atari's 4"""
    cuda: bool = False
    """train on the GPU (cuda:0), several learners or members on one each (cuda:0, cuda:1, ...)"""
    act_on: Literal["auto", "cpu", "cuda"] = "auto"
    """with --cuda: where actors compute; auto: on the GPU for images, if processes can share its memory"""
    cuda_graph: bool = True
    """with --cuda: an actor's pass and a gradient step are one CUDA graph each; off for a net or loss of your own that
    waits for the GPU"""
    num_actors: Annotated[int, Between(1, 1024)] = 2
    """parallel actor processes"""
    num_envs: Annotated[int, Between(1, 4096)] = 32
    """environments for each actor (B)"""
    total_steps: Count = 10_000_000
    """total timesteps: stop after this many agent steps, over all actors"""
    stop_return: float | None = None
    """early stopping: solved when the mean return of the last 100 games (20 suffice) reaches this; None: to the end"""
    eval_every: Annotated[int, Between(0)] = 0
    """evaluation interval (agent steps): a process beside the training plays whole games, greedily; 0: no evaluation"""
    eval_episodes: Annotated[int, Between(1, 10_000)] = 20
    """episodes in each evaluation, the same seeds every time"""
    eval_max_steps: Count = 27_000
    """longest evaluation game (agent steps): it is cut there, with the return so far; Atari ends games there itself"""
    eval_envs: Count = 8
    """environments that play evaluation games at the same time, in one process"""
    stop_eval_return: float | None = None
    """early stopping: solved when the mean return of an evaluation reaches this; needs --eval-every"""
    max_seconds: Annotated[float, Between(0.1)] | None = None
    """time limit, counted from the first rollout of this start (s)"""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 1
    """random seed of weights, environments and sampling"""
    run_name: str | None = None
    """name of the run folder in runs-dir; default: chapter, environment, seed and time"""
    runs_dir: Path = Path("runs")
    """folder for run folders: checkpoints, logs, TensorBoard events"""
    resume: Path | None = None
    """run folder to continue from its newest checkpoint, in its environment, with its settings; flags override them"""
    resume_or_start: bool = False
    """continue the run --run-name if it has a checkpoint, else start it: one command for schedulers that repeat jobs"""
    checkpoint_seconds: Annotated[float, Between(0.1)] = 60.0
    """time between checkpoints (s)"""
    checkpoint_steps: Count | None = None
    """additional checkpoints every N agent steps; the newest three are kept"""
    track: Literal["none", "wandb", "trackio"] = "none"
    """send the curves to an experiment tracker as well; TensorBoard events are always written"""
    deterministic: bool = False
    """reproducible training: fixed order of rollouts and weights; runs with the same seed are bit-identical"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """mixed precision for nets on images (vectors: always fp32); auto: bf16 where the hardware supports it"""
    learner_threads: Annotated[int, Between(1, 1024)] = 1
    """CPU threads for torch in each learner"""
    max_restarts: Annotated[int, Between(0)] = 5
    """restarts of crashed or hanging actors, for each learner, before the run fails; as many again for the evaluator"""
    hang_seconds: Annotated[float, Between(1)] = 60.0
    """timeout: seconds without a step until an actor or evaluator is restarted; 120 or more to make an environment"""
    gamma: Fraction = 0.99
    """discount factor gamma"""
    reward_clip: bool = True
    """clip rewards to their sign for learning, default: on Atari only; reported returns stay raw"""
    reward_scale: Annotated[float, Between(1e-30)] | None = 1.0
    """multiply rewards by this for learning, after clipping (1: leave them as they are); none: divide by the deviation
    of the returns so far"""
    life_loss_terminal: bool = True
    """treat a lost life as terminal for learning (episodic life); the game goes on"""
    normalize_obs: bool = True
    """normalize observations by running mean and standard deviation; vectors beyond 5 of them grow logarithmically"""

    @property
    def algorithm(self) -> str:
        """Name of chapter and algorithm, in run folders and checkpoints."""
        return f"{self.chapter}_{self.algo}" if hasattr(self, "algo") else self.chapter

    @property
    def max_actors(self) -> int:
        """With those that may join."""
        return self.num_actors

    @property
    def explorers(self) -> int:
        """Environments of each actor, its first ones, that explore: their games do not enter the mean return.

        The share `explore_envs` of them, rounded up as long as they are a quarter of all at most.
        """
        share = round(getattr(self, "explore_envs", 0.0) * self.num_envs, 9)  # 0.07 of 100 are 7.000000000000001
        return min(math.ceil(share), max(self.num_envs // 4, int(share + 0.5)), self.num_envs - 1)

    @property
    def local_actors(self) -> int:
        """Those that this machine must have memory and open files for."""
        return self.num_actors

    @property
    def local_learners(self) -> int:
        """Learners that this machine must have memory for."""
        return getattr(self, "num_learners", 1)

    def gpu_of(self, rank: int) -> int:
        """The number of a learner's GPU among those that its process can use."""
        return rank

    @property
    def in_order(self) -> bool:
        """Whether the learner takes one message of every actor in each round, in the order of the actors."""
        return self.deterministic


@dataclass(frozen=True)
class Between:
    """Range of a numeric flag, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:.10g} or more"
        return f"between {self.low:.10g} and {self.high:.10g}"


Count = Annotated[int, Between(1)]
NonNegative = Annotated[float, Between(0)]
Positive = Annotated[float, Between(1e-9)]
Fraction = Annotated[float, Between(0, 1)]


def flag_name(field: str) -> str:
    return field.replace("_", "-")


def check_ranges(args: Any) -> None:
    """Raise ConfigError for the first field outside the `Between` of its annotation, or not finite."""
    hints = typing.get_type_hints(type(args), include_extras=True)
    for name in (field.name for field in dataclasses.fields(args)):
        given = getattr(args, name)
        for value in given if isinstance(given, tuple) else (given,):
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                raise ConfigError(flag_name(name), value, "must be a finite number")
            for bounds in bounds_of(hints[name]):
                if not bounds.low <= value <= bounds.high:
                    raise ConfigError(flag_name(name), value, f"must be {bounds}")


def bounds_of(hint: Any) -> list[Between]:
    """The `Between` of an annotation, also inside `X | None`."""
    found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Between)]
    return found + [bounds for inner in typing.get_args(hint) for bounds in bounds_of(inner)]
