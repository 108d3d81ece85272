"""Checks before a run starts any process: processor, memory, open files, device, environment, learners."""

from __future__ import annotations

import difflib
import math
import platform
import resource
import socket
import sys
import typing
from contextlib import suppress
from types import UnionType
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.error import DependencyNotInstalled
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import nn

import wrappers
from a3c_mp.config import CommonArgs, flag_name
from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.nets.distributions import ACTIONS
from a3c_mp.processes.free_memory import GIB, MIB, free_memory
from a3c_mp.processes.slots import check_shared_memory

FILES = 64
"""upper bound on the open files of a trainer without actors; it has about 15"""
FILES_PER_ACTOR = 4
"""three pipes and a sentinel"""
ACTOR_BYTES = 150 * MIB
"""private memory of an actor once torch is loaded, without environments"""
CONTEXT_BYTES = 300 * MIB
"""host memory of a CUDA context: an estimate, not documented by NVIDIA or PyTorch, not measured on a GPU"""
CONTEXT_GPU_BYTES = 450 * MIB
"""GPU memory of one: 426 MiB with torch 2.10 and CUDA 13 in github.com/unslothai/unsloth-zoo/pull/1053; not measured"""
ORDERED_STORES = ("x86_64", "amd64")
"""processors on which all cores see the stores of one core in the order of the program"""
FIX_ENV = "fix the environment, or choose another"
NAMES_OF_ACTIONS = {
    Discrete: "Discrete from 0",
    Box: "Box of floating-point numbers",
    MultiDiscrete: "MultiDiscrete from 0",
}
"""classes of action spaces in error messages"""
LOOPBACK_ADDRESS = "127.0.0.1"


class FoundEnv(NamedTuple):
    """What `probe_env` found out about an environment."""

    obs_space: gymnasium.Space
    action_space: gymnasium.Space
    layout: str  # of observations that were flattened


FOUND: dict[str, FoundEnv] = {}
"""environment id -> what the newest `probe_env` in this process found"""


def check_limits(args: CommonArgs, net: nn.Module, shares_snapshots: bool = True) -> None:
    """Raise ConfigError if the processor, free memory or open files do not suffice for the processes and weights.

    Args:
        args: the chapter's settings.
        net: that is trained.
        shares_snapshots: with the evaluator, if there is one, through shared memory.
    """
    check_system()
    check_processor()
    evaluators = int(args.eval_every > 0)
    num_learners = getattr(args, "num_learners", 1)
    check_memory(args.local_actors, num_learners, args.gpu_actors, args.cuda, evaluators, args.actors_flag)
    check_open_files(args.local_actors, args.actors_flag)
    try:
        if not args.cuda:
            copies = 2 + 2 * evaluators * shares_snapshots
            check_shared_memory(copies * sum(4 * t.numel() for t in net.state_dict().values()))
    except MemoryError as error:
        fix = "lower it or --num-envs"
        raise ConfigError(args.actors_flag, args.num_actors, f"for the weights {error}", fix) from error


def check_evaluation(args: CommonArgs) -> None:
    """Raise ConfigError for `--stop-eval-return` without evaluations."""
    if args.stop_eval_return is not None and not args.eval_every:
        why = "there is no evaluation whose return could reach it"
        fix = "give --eval-every too, or leave it out (resumed: --stop-eval-return none)"
        raise ConfigError("stop-eval-return", args.stop_eval_return, why, fix)


def check_system() -> None:
    """Raise ConfigError on anything but Linux."""
    if (system := platform.system()) != "Linux":
        why = "processes share memory (memfd_create) and end with their parent (prctl) by calls that only Linux has"
        raise ConfigError("system", system, why, "use Linux, or a Linux container: see docs/platforms.md")


def check_processor() -> None:
    """Raise ConfigError for a processor without ordered stores.

    `Weights` and `Shards` write data and then a counter into shared memory, without a lock or a memory barrier.
    """
    machine = platform.machine()
    if machine.lower() not in ORDERED_STORES:
        why = "weights and replay are shared without locks, which relies on the memory order of x86-64"
        raise ConfigError("machine", machine, why, "use a machine with an Intel or AMD processor")


def check_memory(
    num_actors: int, num_learners: int, gpu_actors: int, cuda: bool, evaluators: int = 0, flag: str = "num-actors"
) -> None:
    """Raise ConfigError, which names `flag`, if host or GPU memory is too small for all processes but one learner."""
    contexts = gpu_actors + (num_learners - 1 if cuda else 0)
    needed = (num_actors + num_learners - 1 + evaluators) * ACTOR_BYTES + contexts * CONTEXT_BYTES
    if needed > (free := free_memory()):
        why = f"that takes {needed // MIB:,} MiB of memory at least, {free // MIB:,} MiB is free"
        raise ConfigError(flag, num_actors, why, "lower it")
    if not gpu_actors:
        return
    needed = gpu_actors // num_learners * CONTEXT_GPU_BYTES  # the learner has its own already
    if needed > (free := torch.cuda.mem_get_info()[0]):
        why = f"that takes {needed // MIB:,} MiB of a GPU's memory at least, {free // MIB:,} MiB is free"
        raise ConfigError(flag, num_actors, why, "lower it, or leave --cuda out")


def check_replay_memory(replay_size: int, needed: int) -> None:
    """Raise ConfigError if a replay of `needed` bytes, of all learners together, does not fit into memory."""
    if needed > (free := free_memory()):
        rounded = math.ceil(10 * needed / GIB) / 10, math.floor(10 * free / GIB) / 10
        why = "the replay needs {:.1f} GiB, {:.1f} GiB is free".format(*rounded)
        raise ConfigError("replay-size", replay_size, why, "lower --replay-size")


def check_open_files(num_actors: int, flag: str = "num-actors") -> None:
    """Raise the soft limit of open files to what is needed. Raises ConfigError, which names `flag`, if it cannot be."""
    needed = FILES + FILES_PER_ACTOR * num_actors
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        why = f"that takes {needed} open files, {hard} are allowed"
        raise ConfigError(flag, num_actors, why, "lower it, or raise the limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one, where others may open connections to this process.

    A connection of a stranger holds a file for as long as its handshake may take. Under the usual soft limit of 1,024 a
    flood of them would leave none for a checkpoint.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def probe_env(
    env_id: str, actions: type[gymnasium.Space] | UnionType = ACTIONS
) -> tuple[gymnasium.Space, gymnasium.Space]:
    """(observation space, action space) of an environment, which is made, stepped and closed for it.

    Discrete actions of an environment with masks are `MaskedDiscrete`.

    Args:
        env_id: gymnasium id.
        actions: the class of action space that the chapter needs, or a union of several; by default all that
            actor-critic nets have distributions for.

    Raises:
        ConfigError: it cannot be made, has another kind of actions, breaks gymnasium's API or ends the process.
    """
    try:
        env = wrappers.make_env(env_id)
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # an environment of the user's own can raise anything
        # gymnasium's guess leaves out the version
        why = _describe_env_error(error).split(" Did you mean:")[0].rstrip(".")
        fix = "install it, or choose another" if isinstance(error, DependencyNotInstalled) else _fix_for(env_id)
        raise ConfigError("env-id", env_id, why, fix) from error
    try:
        spaces = env.observation_space, env.action_space
        layout = wrappers.layout(env)
        if not isinstance(spaces[1], actions) or not _is_plain(spaces[1]):
            kinds = typing.get_args(actions) or (actions,)
            *others, last = (NAMES_OF_ACTIONS.get(kind, kind.__name__) for kind in kinds)
            needed = f"{', '.join(others)} or {last}" if others else last
            fix = "choose another" if Discrete in kinds else "choose another, for instance Pendulum-v1"
            raise ConfigError("env-id", env_id, f"its actions are {spaces[1]}, this needs {needed}", fix)
        _check_contract(env, env_id)
        masked = False
        with suppress(Exception):
            masked = wrappers.mask_in(env.reset(seed=0)[1], spaces[1]) is not None
    finally:
        with suppress(Exception):
            env.close()
    if masked and isinstance(spaces[1], Discrete):
        spaces = spaces[0], wrappers.MaskedDiscrete(spaces[1].n)
    FOUND[env_id] = FoundEnv(*spaces, layout)
    return spaces


def _is_plain(space: gymnasium.Space) -> bool:
    """Whether actions are numbered from 0, or are floating-point numbers."""
    if isinstance(space, Box):
        return space.dtype.kind == "f"
    return not np.any(getattr(space, "start", 0))


def _check_contract(env: gymnasium.Env, env_id: str) -> None:
    try:
        wrappers.check_contract(env)
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        if isinstance(error, wrappers.BrokenContract) or not isinstance(error, Exception):
            raise ConfigError("env-id", env_id, _describe_env_error(error), FIX_ENV) from error
        # an actor reports other errors of the environment, with their traceback


def _describe_env_error(error: BaseException) -> str:
    """The message of an error that an environment raised."""
    text = " ".join(str(error).split())
    if not isinstance(error, Exception):  # SystemExit: an environment must not end the process
        return f"it raises {type(error).__name__}({text})"
    return (text or type(error).__name__).rstrip(".")


def _fix_for(env_id: str) -> str:
    """How to fix an environment id that cannot be made: a similar id, if there is one."""
    module, _, env_id = wrappers.split_id(env_id)[0].rpartition(":")
    if module and module not in sys.modules:
        if module.endswith(".py"):
            return "leave out .py: a module name stands before the colon"
        return "the module must be installed or lie in the current folder"
    if env_id in gymnasium.registry:
        return "choose another, or other --env-kwargs"
    if (atari := f"ALE/{env_id}") in gymnasium.registry:
        return f"perhaps you meant {atari}"
    known = {name.casefold(): name for name in gymnasium.registry}
    wanted = env_id.casefold()
    alike = [name for name in known if name.startswith(f"{wanted}-v")][-1:]  # the newest version
    alike = alike or difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    if alike:
        meant = known[alike[0]]
        return f"perhaps you meant {f'{module}:{meant}' if module else meant}"
    if module:
        return f"{module} was imported and registers no {env_id}: call gymnasium.register in it, or check the spelling"
    return "check the spelling, or see gymnasium.pprint_registry()"


def check_device(cuda: bool) -> torch.device:
    """The device of the nets. Raises ConfigError for `--cuda` without CUDA."""
    if cuda and not torch.cuda.is_available():
        version = torch.version.cuda
        why = f"torch sees no GPU that its CUDA {version} can use" if version else "this torch has no CUDA"
        fix = "see nvidia-smi for GPU and driver" if version else "install a CUDA build of torch"
        raise ConfigError("cuda", True, why, f"leave --cuda out (resumed: give --no-cuda), or {fix}")
    return torch.device("cuda" if cuda else "cpu")


def check_exploration(args: CommonArgs) -> None:
    """Raise ConfigError for exploration that the actions do not have; `probe_env` has found out which they are.

    Runs that are resumed keep settings of noise that older versions accepted, without effect.
    """
    if args.env_id not in FOUND:
        return
    settings = vars(args)  # not every chapter has them
    if not isinstance(FOUND[args.env_id].action_space, Box):
        for name, default in (("log_std_init", 0.0), ("noise_steps", 1)):
            if settings.get(name, default) != default and args.resume is None:
                why = f"it is for the noise of continuous actions, those of {args.env_id} are discrete"
                raise ConfigError(flag_name(name), settings[name], why, "leave it out")
    elif args.explorers:
        why = f"it repeats discrete actions, those of {args.env_id} are continuous"
        fix = "set it to 0 (--noise-steps holds their noise)"
        raise ConfigError("explore-envs", settings["explore_envs"], why, fix)


def check_learners(num_learners: int, num_actors: int, cuda: bool) -> None:
    """Raise ConfigError unless all learners get the same number of actors, and with CUDA a GPU each."""
    if num_actors % num_learners:
        why = f"{num_actors} actors cannot be divided evenly"
        raise ConfigError("num-learners", num_learners, why, "let --num-actors be a multiple of it")
    if cuda and num_learners > max(1, torch.cuda.device_count()):
        why = f"each needs a GPU to itself, there are {torch.cuda.device_count()}"
        raise ConfigError("num-learners", num_learners, why, "lower it, or leave --cuda out")
    if num_learners > 1:
        try:
            with socket.create_server((LOOPBACK_ADDRESS, 0)) as server:
                socket.create_connection(server.getsockname(), 2.0).close()
        except OSError as error:
            why = f"learners need the loopback interface, which is down ({error.strerror})"
            fix = "enable it (ip link set lo up), or lower it"
            raise ConfigError("num-learners", num_learners, why, fix) from error
