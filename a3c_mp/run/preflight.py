"""Before a run starts any process: checks of settings, machine and environment; torch's settings and the device."""

import importlib.util
import math
import multiprocessing
import os
import platform
import resource
import tempfile
from contextlib import suppress
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from a3c_mp import wrappers
from a3c_mp.config import CommonArgs, flag_name
from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.nets.distributions import ACTIONS
from a3c_mp.nets.layers import is_image
from a3c_mp.nets.precision import make_deterministic
from a3c_mp.processes import memory_order
from a3c_mp.processes.slots import GIB, MIB, free_memory

if TYPE_CHECKING:
    from a3c_mp.wrappers.trial import Trial

FILES, FILES_PER_ACTOR = 64, 4  # open files of a trainer without actors, which has about 15; three pipes and a sentinel
ACTOR_BYTES = 150 * MIB  # private memory of an actor once torch is loaded, without environments
NET_COPIES = 6  # in a learner: the net, its gradient, two moments of Adam, two published versions
OBS_COPIES = 8  # of the vectors in a learner's rollouts: in statistics, batches and inputs of the net
STATS = 129  # numbers for each one of a wide observation in its statistics (`obs_stats`)
ENV_COPIES = 20  # of the vectors of an actor's environments: in their spaces (bounds), wrappers and steps
WIDE = 10_000  # numbers of an observation that is the cause where memory is too small
TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the variable; torch makes the folder with the first optimizer
FOUND: dict[str, tuple[gymnasium.Space, gymnasium.Space, str]] = {}
"""environment id -> (observation space, action space, layout of observations) of `probe_env`"""
TRIALS: dict[str, "Trial"] = {}  # environment id -> what steps have shown there


def check_settings(args: CommonArgs) -> None:
    """Raise ConfigError for a goal, a tracker or exploration that cannot be; called after `probe_env`."""
    is_late = args.resume is None and args.eval_every > args.total_steps
    if args.stop_eval_return is not None and (is_late or not args.eval_every):
        late = f" (--eval-every {args.eval_every:,}, --total-steps {args.total_steps:,})" if is_late else ""
        why = f"there is no evaluation whose return could reach it{late}"
        fix = f"give {'a smaller ' if late else ''}--eval-every too, or leave it out (resumed: --stop-eval-return none)"
        raise ConfigError("stop-eval-return", args.stop_eval_return, why, fix)
    if args.track != "none" and importlib.util.find_spec(args.track) is None:
        raise ConfigError("track", args.track, f"{args.track} is not installed", f"pip install {args.track}")
    if args.env_id not in FOUND:
        return
    settings = vars(args)  # not every chapter has them
    if not isinstance(FOUND[args.env_id][1], Box):
        for name in ("log_std_init", "mean_limit", "noise_steps"):
            if name in settings and settings[name] != type(args).__dataclass_fields__[name].default:
                why = f"it is for continuous actions, those of {args.env_id} are discrete"
                raise ConfigError(flag_name(name), settings[name], why, "leave it out")
    elif args.explorers:
        why = f"it repeats discrete actions, those of {args.env_id} are continuous"
        fix = "set it to 0 (--noise-steps holds their noise)"
        raise ConfigError("explore-envs", settings["explore_envs"], why, fix)


def check_limits(args: CommonArgs, net: nn.Module | None = None) -> None:
    """Raise ConfigError if free memory or open files do not suffice for the processes of a run."""
    is_alone = vars(args).get("standalone", False)  # its collectors and evaluator are in this process
    actors, others = (0, 0) if is_alone else (args.local_actors, args.local_learners - 1 + (args.eval_every > 0))
    check_processes(actors, others, args.actors_flag)
    if net is not None and args.env_id in FOUND:
        check_memory(args, net, (actors + others) * ACTOR_BYTES)


def check_memory(args: CommonArgs, net: nn.Module, besides: int = 0) -> None:
    """Raise ConfigError if what processes hold of a net and of vector observations does not fit into free memory.

    The net may lie on torch's device meta: it can be too large to be made. `besides`: bytes of the processes.
    """
    settings, (obs_space, *_) = vars(args), FOUND[args.env_id]  # not every chapter has all of them
    params = sum(tensor.numel() for tensor in net.state_dict().values())
    is_bytes = is_image(obs_space) and obs_space.dtype == np.uint8  # they become floats a batch at a time
    width = 0 if is_bytes else math.prod(obs_space.shape or ())
    if "unroll_length" in settings:
        obs = OBS_COPIES * max(args.num_envs, settings.get("batch_unrolls", 0)) * (1 + settings["unroll_length"])
    else:  # a state and its successor in each batch, and as inputs of online and target net
        obs = settings.get("batch_size", 1) * (5 + 2 * settings.get("prefetch", 0))
    acting = params + ENV_COPIES * args.num_envs * width
    learning = NET_COPIES * params + (obs + STATS) * width
    by_actor, by_learner = acting + args.actors_learn * learning, learning
    if args.cuda:
        by_learner = STATS * width  # the rest is on the GPU
        if args.act_on == "cuda" or (args.act_on == "auto" and is_image(obs_space)):  # so are the actors' nets
            by_actor = acting - params + args.actors_learn * (obs // OBS_COPIES) * width  # a rollout in host memory
    needed, free = besides + 4 * (args.local_actors * by_actor + args.local_learners * by_learner), free_memory()
    if needed > free:
        why = f"observations {obs_space.shape} and nets of {params:,} parameters take about {_in_gib(needed, free)}"
        fix = f"lower --{args.actors_flag}, --num-envs or the length of rollouts"
        if width > WIDE:
            smaller = "set --frame-size 84" if is_image(obs_space) else "make its observations smaller"
            raise ConfigError("env-id", args.env_id, why, f"{smaller}, or {fix}")
        raise ConfigError("num-envs", args.num_envs, why, fix)


def _in_gib(needed: int, free: int) -> str:
    """What is needed, rounded up, and what is free, rounded down, to a tenth of a GiB."""
    return f"{math.ceil(10 * needed / GIB) / 10:.1f} GiB, {math.floor(10 * free / GIB) / 10:.1f} GiB is free"


def check_system() -> None:
    """Raise ConfigError on anything but Linux on a processor whose order of loads and stores is known.

    It comes before anything is allocated, and also does `check_temporary_folder`.
    """
    if (system := platform.system()) != "Linux":
        why = "processes share memory (memfd_create) and end with their parent (prctl) by calls that only Linux has"
        raise ConfigError("system", system, why, "use Linux, or a Linux container: see docs/platforms.md")
    if memory_order.full_barrier(machine := platform.machine()) is None:
        why = f"processes share memory without locks, which needs x86-64, or aarch64 and {memory_order.LIBRARY}"
        fix = "on aarch64 install it (Debian, Ubuntu: libatomic1; Fedora: libatomic)"
        raise ConfigError("machine", machine, why, fix)
    check_temporary_folder()


def find_temporary_folder() -> str:
    """The folder for temporary files. Raises ConfigError if there is none that can be written."""
    try:
        return tempfile.gettempdir()
    except OSError as error:
        fix = "let TMPDIR name a folder that can be written"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR", ""), str(error.strerror), fix) from error


def check_temporary_folder() -> None:
    """Raise ConfigError if there is none that can be written: torch's optimizers need it, and nodes their sockets."""
    default = os.path.join(find_temporary_folder(), f"torchinductor_{os.getuid()}")
    for folder in (os.environ.get(TORCH_FOLDER) or default, default):  # torch gets the first that can be made
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            os.environ[TORCH_FOLDER] = folder
            return
    raise ConfigError(TORCH_FOLDER, default, "it cannot be made", "let it name a folder that can be written")


def check_processes(num_actors: int, others: int = 0, flag: str = "num-actors") -> None:
    """Raise ConfigError, which names `flag`, if memory or open files do not suffice for actors and other processes."""
    if (needed := (num_actors + others) * ACTOR_BYTES) > (free := free_memory()):
        why = f"that takes {needed // MIB:,} MiB of memory at least, {free // MIB:,} MiB is free"
        raise ConfigError(flag, num_actors, why, "lower it")
    files = FILES + FILES_PER_ACTOR * num_actors
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        why = f"that takes {files} open files, {hard} are allowed"
        raise ConfigError(flag, num_actors, why, "lower it, or raise the limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # nodes that connect take files, too


def check_replay_memory(replay_size: int, needed: int) -> None:
    """Raise ConfigError if a replay of `needed` bytes, of all learners together, does not fit into memory."""
    if needed > (free := free_memory()):
        why = f"the replay needs {_in_gib(needed, free)}"
        raise ConfigError("replay-size", replay_size, why, "lower --replay-size")


def check_learners(args: Any) -> None:
    """Raise ConfigError unless all learners get the same number of actors, and with CUDA a GPU each."""
    num_learners = args.num_learners
    if args.num_actors % num_learners:
        why = f"{args.num_actors} actors cannot be divided evenly"
        raise ConfigError("num-learners", num_learners, why, "let --num-actors be a multiple of it")
    if args.cuda and args.gpu_of(num_learners - 1) >= max(1, torch.cuda.device_count()):
        why = f"each needs a GPU to itself, there are {torch.cuda.device_count()}"
        raise ConfigError("num-learners", num_learners, why, "lower it, or leave --cuda out")


def set_up_torch(args: CommonArgs, rank: int = 0) -> torch.device:
    """Seed torch, set its threads and determinism, and return the device of the nets: with `--cuda` a GPU."""
    check_system()
    device = torch.device("cpu")
    if args.cuda:
        from a3c_mp.run.gpu import open_gpu

        device = open_gpu(args.gpu_of(rank))
    torch.set_num_threads(args.learner_threads)
    torch.manual_seed(args.seed)
    if args.deterministic and args.cuda:  # on the CPU results are deterministic anyway
        make_deterministic()
    return device


def probe_env(
    env_id: str, actions: type[gymnasium.Space] | UnionType = ACTIONS, number: int = 0,
    heartbeats: Any = wrappers.UNWATCHED,
) -> tuple[gymnasium.Space, gymnasium.Space]:  # fmt: skip
    """Make, step and close an environment of process `number`; return its (observation space, action space).

    Its calls are heartbeats, as in `make_vec_env`. Raises ConfigError if it cannot be made, has no `actions` of this
    class, breaks gymnasium's API or ends the process.
    """
    from a3c_mp.wrappers.trial import check_contract  # here, as actors need none of it

    process = (number, *getattr(multiprocessing.current_process(), "_identity", ()))[-1]  # children may try it at once
    before = wrappers.assume_identity(wrappers.OUTSIDE, process)
    env: Any = None
    masked = False
    try:
        heartbeats.starting()
        env = wrappers.make_env(env_id)
        if first := wrappers.NOT_MADE.get(env_id):
            why = f"it could be made now, but not at first, so its settings are not known ({first})"
            raise ConfigError("env-id", env_id, why, "start again")
        obs_space, action_space, layout = env.observation_space, env.action_space, wrappers.layout(env)
        _check_actions(action_space, actions, env_id)
        for what, space in ("observations", obs_space), ("actions", action_space):
            if 0 in (space.shape or ()):
                raise ConfigError("env-id", env_id, f"its {what} have no numbers", "give them one, if only a constant")
        try:
            TRIALS[env_id] = check_contract(env, heartbeats.beat)
        except wrappers.BrokenContract:
            raise
        except Exception:  # an actor reports it, with its traceback
            pass
        heartbeats.starting()
        with suppress(Exception):
            masked = wrappers.mask_in(env.reset(seed=0)[1], action_space) is not None
    except (KeyboardInterrupt, Stopped, ConfigError):
        raise
    except BaseException as error:  # an environment of the user's own can raise anything
        from a3c_mp.run.refusal import refusal_of

        raise refusal_of(error, env_id) from error
    finally:
        with suppress(Exception):  # it may not have been made
            env.close()
        wrappers.assume_identity(*before)  # an environment may load a policy
    if masked and isinstance(action_space, Discrete):
        action_space = wrappers.MaskedDiscrete(action_space.n)
    FOUND[env_id] = obs_space, action_space, layout
    return obs_space, action_space


def _check_actions(space: gymnasium.Space, kinds: type[gymnasium.Space] | UnionType, env_id: str) -> None:
    is_float = isinstance(space, Box) and space.dtype.kind == "f"
    if isinstance(space, kinds) and (is_float or not isinstance(space, Box)):
        return
    names = [kind.__name__ for kind in get_args(kinds) or (kinds,)]
    needed = ", ".join(f"{name} of floating-point numbers" if name == "Box" else name for name in names)
    fix = "give --wrapper module:Class, a gymnasium.ActionWrapper of your own"
    if kinds in (Discrete, Box) and (is_float or isinstance(space, Discrete)):
        fix = "choose another, or another --algo"
        fix += ", or --wrapper gymnasium.wrappers:DiscretizeAction,bins=5" if is_float else ""
    raise ConfigError("env-id", env_id, f"its actions are {space}, this needs {needed}", fix)
