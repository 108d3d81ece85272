"""An actor's vector environment and the games in it, new or rebuilt from an action log."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.data.resume_states import ActorState
from a3c_mp.processes.pool import ActorChannel
from a3c_mp.seeds import derive_seeds
from wrappers import make_vec_env, obs_hashes


def make_envs(args: CommonArgs, channel: ActorChannel) -> VectorEnv:
    """Make an actor's vector environment, seeded for this actor, and closed however the process ends."""
    env_seed, _ = derive_seeds(args.seed, *channel.seed_key)
    env = make_vec_env(args.env_id, args.num_envs, seed=env_seed, rebuildable=args.deterministic)
    return channel.closing(env)


class Games:
    """Games in progress of an actor: new ones, or rebuilt to where a predecessor stopped.

    Args:
        env: from `make_vec_env`, `rebuildable` in a deterministic run.
        channel: to the learner.
    """

    def __init__(self, env: VectorEnv, channel: ActorChannel):
        self.env, self.stats = env, EpisodeStats(env.num_envs)
        state: ActorState | None = channel.restored
        self.rollouts, self.messages = (state.rollouts, state.messages) if state else (0, 0)
        self.successor_state = state.successor_state if state else {}
        self.obs: np.ndarray = env.rebuild(state.games, channel.beat) if state else env.reset()[0]  # type: ignore[attr-defined]
        if not self.successor_state:
            return
        differing = np.flatnonzero(obs_hashes(self.obs) != self.successor_state["obs_hash"])
        if len(differing):
            self.obs, self.successor_state, self.messages = env.start_new_games(), {}, 0  # type: ignore[attr-defined]
            why = "is not deterministic: the same seed and actions gave other observations"
            channel.not_restored(f"environment {differing[0]} {why}; it starts new games")
        else:
            self.stats.restore(self.successor_state)

    def state_fields(self, action: Tensor, done: Tensor, obs: Tensor) -> dict[str, Any]:
        """Return the state fields that all chapters share, of steps [T, B] and the observations [B, ...] after them."""
        return {"action": action, "done": done, "obs_hash": obs_hashes(obs.numpy()), **self.stats.fields()}
