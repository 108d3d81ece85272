"""The process of an actor: what it shares with its learner, its environments and the games in them, and its loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.data.resume_states import ActorState
from a3c_mp.errors import one_line
from a3c_mp.processes.pool import Token
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.seeds import derive_seeds, seed_global_generators
from a3c_mp.wrappers import GuardedEnvs, make_vec_env, obs_hashes

Fill = Callable[[Token], Any]
"""fills the slot of a token; returns a few figures to send with it, such as the version of the weights that acted"""


@dataclass
class Memory:
    """What actors share with their learner: shared memory of one machine, or what stands for it on another."""

    slots: Any  # `Slots`; on another machine a dictionary with the same slot for every number, whose fields are sent
    weights: Any  # `Weights`, or what requests them from another machine
    states: Any  # `ResumeStates` or `SentStates`
    dtype: torch.dtype  # that actors compute in
    in_order: bool  # whether actors act with the version that a token names; otherwise with the newest
    more: Any = None
    """of chapter 2 the weights that actors act with (`Weights`), of chapter 3 the replay that they fill (`Shards`)"""
    running: tuple[int, int] | None = None
    """on a cluster, where actors come and go: (index among those that run now, their number); None: all of them run"""

    def place(self, net: Any) -> Any:
        """Move a net to the device of the weights and to the dtype that actors compute in."""
        return net.to(self.weights.device, self.dtype)

    def load(self, net: nn.Module, token: Token) -> int:
        """Copy the newest weights, or in order those that the token names, into `net`; return their version."""
        return self.weights.load(net, token.version if self.in_order else None)


class SentStates:
    """In place of `ResumeStates`, in a deterministic actor on another machine: the state after its last message."""

    def __init__(self, deterministic: bool):
        self.deterministic = deterministic
        self.sent: dict[str, np.ndarray] = {}

    def write(self, slot: int, fields: Callable[..., dict[str, Any]], *args: Any) -> None:
        if self.deterministic:
            self.sent = {name: torch.as_tensor(value).numpy() for name, value in fields(*args).items()}


def run_actor(channel: WorkerChannel, make_actor: Callable[..., Fill], args: Any, memory: Memory) -> None:
    """Entry point of an actor: fill the slots of tokens, one after the other, until the learner ends the process."""
    channel.memory = memory
    fill = make_actor(channel, args)
    for token in channel.tokens():
        channel.send(token.slot, fill(token))


def make_envs(args: CommonArgs, channel: Any) -> GuardedEnvs:
    """Make an actor's vector environment, seeded for this actor, and closed however the process ends."""
    env_seed, _ = derive_seeds(args.seed, *channel.seed_key)
    seed_global_generators(env_seed)
    env = make_vec_env(
        args.env_id, args.num_envs, seed=env_seed, rebuildable=args.deterministic, heartbeats=channel,
        actor=channel.actor,
        fields=getattr(args, "rollout_fields", ()),  # chapter 3 has no rollouts
    )  # fmt: skip
    return channel.closing(env)


class Collector:
    """Base of both collectors: an actor's environments, with new games, or games rebuilt to where a predecessor was."""

    def __init__(self, args: Any, env: Any, channel: Any):
        self.args, self.env, self.channel, self.memory = args, env, channel, channel.memory
        self.stats = EpisodeStats(env.num_envs)
        state: ActorState = channel.restored or ActorState()
        self.rollouts, self.messages, self.successor_state = state.rollouts, state.messages, state.successor_state
        self.obs: Any  # [B, ...] of all environments: an array, in a RolloutCollector a tensor
        if not self.successor_state:
            self.obs = env.rebuild(state.games) if state.games else env.reset()[0]
            return
        what, why = "", "is not deterministic: the same seed and actions"
        try:
            self.obs = env.rebuild(state.games)
            differing = np.flatnonzero(obs_hashes(self.obs) != self.successor_state["obs_hash"])
            what = f"environment {differing[0]} {why} gave other observations" if len(differing) else ""
        except Exception as error:  # other games may not allow the same actions
            what = f"an environment {why} raised {one_line(error)}"
        if what:
            self.obs, self.successor_state, self.messages = env.start_new_games(), {}, 0
            channel.not_restored(f"{what}; it starts new games")
        else:
            self.stats.restore(self.successor_state)

    def seeds(self, *numbers: int) -> tuple[int, int]:
        """Two seeds that follow from the run's seed, the actor and these numbers, such as that of a rollout."""
        return derive_seeds(self.args.seed, *self.channel.seed_key, *numbers)

    def game_fields(self, action: np.ndarray, done: Tensor) -> dict[str, Any]:
        """The state fields that all chapters share, after steps [T, B]."""
        hashes = obs_hashes(np.asarray(self.obs))
        return {"action": action, "done": done, "obs_hash": hashes, **self.stats.fields()}
