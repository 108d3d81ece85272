"""Collecting rollouts: what an actor does between two messages. (Of chapter 3: `apex.BlockCollector`.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.device import acting_forward
from a3c_mp.nets import ActorCritic, initial_state, reset_state
from a3c_mp.rollout import EpisodeStats, Rollout, sample_actions, write_step


class Collector:
    """B environments and the net that acts in them, from one rollout to the next.

    Args:
        env: from `make_vec_env`.
        net: observations -> (logits [B, A], baseline [B]), with a core also state [B, S] -> the next state; the caller
            loads new weights into it between rollouts.
        seed: of action sampling.
        deterministic: on a GPU, compute the same bits every time.
        beat: called once for each environment step.
    """

    def __init__(self, env: VectorEnv, net: ActorCritic, seed: int, deterministic: bool, beat: Callable[[], None]):
        self.env, self.beat = env, beat
        self.rng = torch.Generator(next(net.parameters()).device).manual_seed(seed)
        self.stats = EpisodeStats(env.num_envs)
        self.obs = torch.from_numpy(env.reset()[0])
        self.entry = initial_state(net, env.num_envs)  # the core's state before self.obs
        self.forward = acting_forward(net, self.obs, *self.entry, deterministic=deterministic)
        self.logits: Tensor | None = None  # of the next action, known before the rollout that it belongs to

    @torch.inference_mode()
    def act(self, obs: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(logits [B, A] float32, baseline [B] float32, next state of the core), for observations on the CPU."""
        logits, baseline, *state = self.forward(obs, *state)
        return logits.float(), baseline.float(), state

    def collect(self, rollout: Rollout) -> None:
        """Fill a rollout with the next T steps of every environment.

        There is one forward pass a step: on obs[t+1] it gives V(obs[t+1]) and the next action. The first action of a
        rollout therefore comes from the weights of the rollout before; its logits are stored with it, as everywhere.
        """
        if self.logits is None:
            self.logits, self.baseline, self.state = self.act(self.obs, self.entry)
        write_step(rollout, 0, obs=self.obs, baseline=self.baseline)
        for state in self.entry:
            write_step(rollout, 0, core_state=state)
        for t in range(len(rollout.action)):
            action = sample_actions(self.logits, self.rng).cpu()
            next_obs, reward, terminated, truncated, infos = self.env.step(action.numpy())
            self.stats.step(reward, terminated | truncated)
            write_step(
                rollout, t, action=action, reward=reward, terminated=terminated, truncated=truncated,
                life_lost=infos.get("life_lost", False), behaviour_logits=self.logits,
                episode_return=self.stats.returns, episode_length=self.stats.lengths,
            )  # fmt: skip
            if truncated.any():
                write_step(rollout, t, final_baseline=self.act(torch.from_numpy(infos["final_obs"]), self.state)[1])
            write_step(rollout, t + 1, obs=next_obs)
            self.entry = [reset_state(state, self.stats.done) for state in self.state]
            self.logits, self.baseline, self.state = self.act(rollout.obs[t + 1], self.entry)
            write_step(rollout, t + 1, baseline=self.baseline)
            self.beat()
        self.obs = rollout.obs[-1].clone()  # the slot is the learner's from here on
