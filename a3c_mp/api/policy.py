"""`a3c_mp.load_policy`: the policy of a trained run, for `play.py` and for programs of one's own."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from a3c_mp import wrappers
from a3c_mp.algorithms import ddpg, dqn, td3
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.nets.distributions import ACTIONS
from a3c_mp.population.evolution import Genome
from a3c_mp.population.population import EliteNet, saved_net
from a3c_mp.run import checkpoint
from a3c_mp.run.evaluate import Policy, make_play_envs, make_policy, play_episodes
from a3c_mp.run.preflight import probe_env
from a3c_mp.seeds import global_generators_kept

VALUE_BASED = {"dqn": dqn, "ddpg": ddpg, "td3": td3}  # --algo of a run -> its nets and policies, of action values


class TrainedRun(NamedTuple):
    """A run's checkpoint and what is needed to evaluate it."""

    path: Path
    algorithm: str
    algo: Any  # of `VALUE_BASED`; None: an actor-critic
    env_id: str
    net_spec: NetSpec
    state: dict[str, Any]


def find_checkpoint(run: Path, newest: bool = False) -> tuple[Path, Path]:
    """(run folder, checkpoint): the best of a run folder, or else the newest; or the named file."""
    if run.suffix == ".pt" and not run.is_dir():
        return run.absolute().parent.parent, run
    folder = run / "checkpoints"
    best = [] if newest else checkpoint.list_checkpoints(folder, "best")
    paths = best or checkpoint.list_checkpoints(folder)
    if not paths:
        why = "there is no checkpoint in this folder" if run.is_dir() else "there is no such folder or checkpoint (.pt)"
        raise ConfigError("run", run, why, "name a run folder, runs/<name>")
    return run, paths[0]


def load_run(run: Path, member: int | None = None) -> TrainedRun:
    """Load a checkpoint and its run's settings, or an exported policy (.safetensors).

    Raises ConfigError if they cannot be read or do not match.
    """
    if run.suffix == ".safetensors" and not run.is_dir():
        if member is not None:
            raise ConfigError("member", member, f"{run} has one net", "leave it out")
        return load_exported(run)
    folder, path = find_checkpoint(run, newest=member is not None)
    try:
        config = json.loads((folder / "config.json").read_text())
        env_id, algorithm = config["args"]["env_id"], config["algorithm"]
        state = checkpoint.load(path, algorithm=algorithm, env_id=env_id)
        if member is not None:
            state["net"] = net_of_member(state, member, algorithm)
        algo = VALUE_BASED.get(config["args"].get("algo", ""))
        if any(name.startswith("advantage.") for name in state["net"]):  # also of an algorithm of the user's own
            algo = dqn
        if genome := genome_of(state["net"]):  # also that of an algorithm of the user's own
            algo = dqn if Genome.from_json(genome).family == "q" else None
        return TrainedRun(path, algorithm, algo, env_id, NetSpec.of_run(config["args"]), state)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        if find_checkpoint(run, newest=member is not None)[1] != path:  # the run has written a better one meanwhile
            return load_run(run, member)
        why = str(error)
        if isinstance(error, json.JSONDecodeError | KeyError):
            why = f"{folder / 'config.json'}: {f'it has no {error}' if isinstance(error, KeyError) else error}"
        raise ConfigError("run", run, why, "name another run or checkpoint") from error


def architecture_of(run: TrainedRun) -> dict[str, Any]:
    """How `load_exported` makes the net again: for the metadata of an exported policy."""
    genome = genome_of(run.state["net"])
    how = {"genome": genome} if genome else {"settings": run.net_spec._asdict()}
    return {"algo": run.algo.__name__.rpartition(".")[2] if run.algo else None, **how}


def genome_of(net: dict[str, Any]) -> str:
    """The genome of a population's net, as JSON; empty for another chapter's."""
    return bytes(net["_extra_state"].tolist()).decode() if "_extra_state" in net else ""


def load_exported(path: Path) -> TrainedRun:
    """A policy from its weights and what the file says of them. Raises ConfigError if they cannot be read."""
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            net = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        how = about["architecture"]
        net = saved_net(how["genome"], net) if "genome" in how else net
        state, spec = {"steps": about["steps"], "net": net}, NetSpec.of_run(how.get("settings", {}))
        return TrainedRun(path, about["algorithm"], VALUE_BASED.get(how["algo"]), about["env_id"], spec, state)
    except ImportError:
        raise ConfigError("run", path, "safetensors is not installed", "pip install safetensors") from None
    except (KeyError, json.JSONDecodeError) as error:  # the latter: what others have written there
        why = f"it does not say its {error.args[0] if isinstance(error, KeyError) else 'architecture'}"
        raise ConfigError("run", path, why, "play.py --export writes files that do") from error
    except Exception as error:  # of the library, for bytes that are no such file
        raise ConfigError("run", path, str(error), "name a run folder, runs/<name>, or another file") from error


def net_of_member(state: dict[str, Any], member: int, algorithm: str) -> dict[str, Any]:
    """The net of the member at a place, as `EliteNet` loads it. Raises ConfigError if there is no such member."""
    members = state.get("extra", {}).get("population", {}).get("members", [])
    if 0 <= member < len(members):
        return saved_net(members[member]["genome"], members[member]["state"][0])
    if members:
        why, fix = f"the checkpoint has {len(members)} members", f"name one from 0 to {len(members) - 1}"
    elif algorithm.startswith("population"):
        why, fix = "a best checkpoint has the fittest member alone", "name the run folder"
    else:
        why, fix = "it is not the checkpoint of a population", "leave it out"
    raise ConfigError("member", member, why, fix)


def load_net(run: TrainedRun) -> tuple[Any, tuple[gymnasium.Space, gymnasium.Space]]:
    """The trained net, and the spaces of its environment. Raises ConfigError if it does not fit the environment."""
    spaces = probe_env(run.env_id, run.algo.ACTIONS if run.algo else ACTIONS)
    net: Any
    of_population = run.algorithm.startswith("population")
    if of_population:
        net = EliteNet(spaces, Genome({}, family="q" if run.algo else "actor_critic"))
    else:
        net = (run.algo.make_net if run.algo else make_actor_critic)(*spaces, run.net_spec)
    try:
        net.load_state_dict(run.state["net"])
    except RuntimeError as error:
        what = f"{run.env_id}, or its net (--net {run.net_spec.net})," if ":" in run.net_spec.net else run.env_id
        raise ConfigError("run", run.path, f"it does not fit {what} as it is now", "name another run") from error
    return net.net if of_population else net, spaces


class TrainedPolicy:
    """A trained policy as a function: observations, of one environment or of N, -> actions for their `step`.

    Observations are those of `make_env`, prepared as in training: vectors are as the environment gives them, `Dict` and
    Atari's are not. Where the net has an LSTM, its state is kept from call to call, for each of the N environments.
    Greedy, unless `sampled`. Raises ConfigError if the net does not fit the environment.
    """

    def __init__(self, run: TrainedRun, *, sampled: bool = False, seed: int = 0):
        self.env_id, self.path, self.steps = run.env_id, run.path, run.state["steps"]
        net, (self.obs_space, self.action_space) = load_net(run)
        self._num = 0  # observations in the last call
        if run.algo:
            self._act: Policy = run.algo.make_policy(net, self.action_space)
        else:
            self._act = make_policy(net, self.action_space, greedy=not sampled, seed=seed)

    def __repr__(self) -> str:
        return f"TrainedPolicy({self.env_id}, {self.steps:,} steps of training, {self.path})"

    def __call__(self, obs: Any, starts: Any = None, mask: Any = None) -> Any:
        """Choose an action, or N of them.

        Args:
            obs: [*obs_shape] or [N, *obs_shape].
            starts: whether an episode begins with it, bool or bool [N]; the first call, the first one after `reset`,
                and one with another N begin episodes anyway. Only an LSTM needs it.
            mask: `info["action_mask"]` as it is, or one for each of N environments; None allows all.

        Raises:
            ValueError: observations or a mask do not fit; also floating-point ones where `make_env` gives uint8.
        """
        if self.obs_space.dtype == np.uint8 and np.asarray(obs).dtype.kind == "f":
            raise ValueError("observations must be uint8 as `make_env` gives them, not floating-point")
        shape = self.obs_space.shape or ()
        wanted = f"{shape} or [{', '.join(map(str, ('N', *shape)))}] as `make_env` gives them"
        try:
            obs = np.array(obs, self.obs_space.dtype, order="C")  # a copy: torch takes no reversed views
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"observations must be {wanted}, not a {type(obs).__name__}") from error
        is_single = obs.shape == shape
        if not is_single and obs.shape[1:] != shape:
            raise ValueError(f"observations must be {wanted}, not {obs.shape}")
        obs = obs[None] if is_single else obs
        begins = True if len(obs) != self._num else starts is not None and starts
        given = [] if mask is None else [mask] if is_single else list(mask)
        if len(given) not in (0, len(obs)):
            raise ValueError(f"{len(given)} masks for {len(obs)} observations")
        # One of several games may have ended, without an action that is allowed, or without a mask.
        ended, free = not is_single, np.ones(wrappers.num_choices(self.action_space).sum(), np.bool_)
        given = [free if m is None else m for m in given] if any(m is not None for m in given) else []
        allowed: list[Any] = [wrappers.mask_in({"action_mask": m}, self.action_space, ended=ended) for m in given]
        masks = np.stack(allowed) if allowed else None
        actions = self._act(obs, np.full(len(obs), begins, np.bool_), masks)
        self._num = len(obs)  # now that nothing was refused
        return actions[0] if is_single else actions

    def evaluate(
        self, episodes: int = 20, *, seed: int = 10_000, num_envs: int = CommonArgs.eval_envs,
        max_steps: int = CommonArgs.eval_max_steps,
    ) -> list[Episode]:  # fmt: skip
        """Play whole games in new environments: if greedy, those of play.py with these flags.

        Returns their raw returns and lengths, in the order in which they end; a game of `max_steps` agent steps is cut.
        The next call of the policy begins episodes. Raises ValueError unless all numbers are 1 or more.
        """
        if min(episodes, num_envs, max_steps) < 1:
            raise ValueError(f"{episodes} episodes of {max_steps} steps in {num_envs} environments")
        with (
            global_generators_kept(),
            closing(make_play_envs(self.env_id, episodes, seed=seed, num_envs=num_envs)) as env,
        ):
            try:
                return list(play_episodes(self, env, episodes, max_steps))
            finally:
                self.reset()

    def reset(self) -> None:
        """Begin episodes with the next call."""
        self._num = 0

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env:
        """Make the environment of the run, with observations as the policy takes them."""
        return wrappers.make_env(self.env_id, render_mode=render_mode)


def load_policy(run: str | Path, *, member: int | None = None, sampled: bool = False, seed: int = 0) -> TrainedPolicy:
    """Load a policy from a run folder, its best checkpoint, or from one file: a checkpoint (.pt), or an exported
    policy (.safetensors).

    Args:
        member: of a population, the one at this place of the newest checkpoint, instead of the fittest so far.
        sampled: sample actions, with this seed, instead of taking the most probable one; nets of action values, such
            as those of DQN, DDPG and TD3, stay greedy.

    Raises:
        ConfigError: there is no checkpoint, or it does not fit the environment.
    """
    return TrainedPolicy(load_run(Path(run).expanduser(), member), sampled=sampled, seed=seed)
