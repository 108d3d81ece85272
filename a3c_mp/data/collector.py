"""Rollout collection: act for T steps in a vector environment. Chapter 3 has `transitions.TransitionCollector`."""

from typing import Any

import gymnasium
import torch
from torch import Tensor

from a3c_mp.data.actor import Collector
from a3c_mp.data.exploration import Bursts
from a3c_mp.data.rollout import Rollout, write_step
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.distributions import mask_logits, num_params
from a3c_mp.nets.layers import reset_acting_state
from a3c_mp.nets.precision import acting_forward
from a3c_mp.processes.pool import Token
from a3c_mp.processes.slots import Spec
from a3c_mp.seeds import BURSTS, NOISE
from a3c_mp.wrappers import ActionScaling, GuardedEnvs, num_choices


def acting_state_spec(num_envs: int, action_space: gymnasium.Space, lstm_size: int = 0) -> Spec:
    """Shapes and dtypes of the state of a `RolloutCollector`, besides its games."""
    state = ((num_envs, lstm_size), torch.float32)
    return {
        "logits": ((num_envs, num_params(action_space)), torch.float32),  # of the next action
        "value": ((num_envs,), torch.float32),  # of the newest observation
        "lstm_state_before": state,  # of the LSTM before the newest observation
        "lstm_state": state,  # of the LSTM after it
    }


class RolloutCollector(Collector):
    """Rollout collector: steps B environments, from `make_envs`, with a copy of the net, T steps for each rollout."""

    def __init__(self, args: Any, env: GuardedEnvs, channel: Any, net: Any = None):
        self.action_space = env.single_action_space
        self.to_env = ActionScaling(self.action_space)
        net = net or make_actor_critic(env.single_observation_space, self.action_space, args.net_spec)
        self.net = net = channel.memory.place(net)
        super().__init__(args, env, channel)  # after the net, as an environment may draw from the same generator
        self.obs = torch.from_numpy(self.obs)
        self.rng = torch.Generator()
        self.bursts: Bursts | None = None
        if args.explorers:
            sizes = num_choices(self.action_space).tolist()
            self.bursts = Bursts(env.num_envs, args.explorers, args.explore_steps, args.explore_after, sizes)
        self.lstm_state_before = [state.cpu() for state in net.initial_state(env.num_envs)]  # before self.obs
        forward = acting_forward(args, net, self.obs, *self.lstm_state_before)
        self.forward = torch.inference_mode()(lambda obs, *state: forward(obs, *state))
        """(obs, LSTM state) on the CPU -> (logits [B, P] and value [B], float32; next LSTM state)"""
        self.unseen_fields = set(args.rollout_fields)  # that no infos have had
        self.logits: Tensor | None = None  # of the next action, computed before the rollout that it belongs to
        if saved := {name: torch.from_numpy(part) for name, part in self.successor_state.items()}:
            self.logits, self.value = saved["logits"], saved["value"]
            self.lstm_state = [saved["lstm_state"].to(zeros) for zeros in self.lstm_state_before]
            self.lstm_state_before = [saved["lstm_state_before"].to(zeros) for zeros in self.lstm_state_before]

    def fill(self, token: Token) -> int:
        """Fill the slot of a token with the next rollout; return the version of the weights that acted."""
        version = self.memory.load(self.net, token)
        self.collect(rollout := Rollout.of(self.memory.slots[token.slot]))
        self.memory.states.write(token.slot, self.state_fields, rollout)
        return version

    def collect(self, rollout: Rollout) -> None:
        """Fill a rollout with the next T steps of every environment.

        Each step has one forward pass: on obs[t+1] it gives V(obs[t+1]) and the next action. Therefore the first action
        of a rollout comes from the weights of the previous rollout; its behaviour logits are stored, as for any action.
        Logits of forbidden actions are masked before they are stored, so the learner sees which were allowed.
        """
        self.rng.manual_seed(self.seeds(self.rollouts)[1])
        if self.logits is None:
            self.logits, self.value, *self.lstm_state = self.forward(self.obs, *self.lstm_state_before)
            self.logits = mask_logits(self.logits, self.env.mask)
        fields = rollout.fields()
        write_step(fields, 0, obs=self.obs, value=self.value)
        for state in self.lstm_state_before:
            write_step(fields, 0, lstm_state=state)
        rollout.truncation_value.zero_()
        bursts = self.bursts if self.bursts and self.bursts.wanted(self.stats.steps_since_reward) else None
        if bursts is not None:
            bursts.draw(lambda stretch: self.seeds(stretch, BURSTS)[0], self.rollouts, len(rollout.action))
        for t in range(len(rollout.action)):
            if self.args.noise_steps > 1:  # so many steps draw the same random numbers, also across rollouts
                hold = (self.rollouts * len(rollout.action) + t) // self.args.noise_steps
                self.rng.manual_seed(self.seeds(hold, NOISE)[1])
            logits = self.logits if bursts is None else bursts.acting_logits(t, self.logits)
            action = self.net.distribution(logits).sample(self.rng)
            next_obs, reward, terminated, truncated, infos = self.env.step(self.to_env(action.numpy()))
            self.stats.step(reward, terminated | truncated)
            self.unseen_fields -= infos.keys()
            write_step(
                fields, t, action=action, reward=reward, terminated=terminated, truncated=truncated,
                life_lost=infos.get("life_lost", False), behaviour_logits=logits, **self.stats.totals(),
                **{name: field.read(infos, name, len(reward)) for name, field in self.args.rollout_fields.items()},
            )  # fmt: skip
            if truncated.any():
                final_obs = torch.from_numpy(infos["final_obs"])
                write_step(fields, t, truncation_value=self.forward(final_obs, *self.lstm_state)[1])
            write_step(fields, t + 1, obs=next_obs)
            self.lstm_state_before = [reset_acting_state(state, self.stats.done) for state in self.lstm_state]
            self.logits, self.value, *self.lstm_state = self.forward(rollout.obs[t + 1], *self.lstm_state_before)
            self.logits = mask_logits(self.logits, self.env.mask)
            write_step(fields, t + 1, value=self.value)
        self.obs = rollout.obs[-1].clone()  # a copy, because the slot goes to the learner
        self.rollouts += 1
        if self.unseen_fields and self.rollouts == 1 and self.channel.actor == 0:
            print(f"infos have no {' or '.join(sorted(self.unseen_fields))} so far: these rollout_fields are 0")

    def state_fields(self, rollout: Rollout) -> dict[str, Any]:
        """The state after a rollout, for `ResumeStates.write`."""
        empty = [self.obs.new_zeros((self.env.num_envs, 0), dtype=torch.float32)]
        before, after = self.lstm_state_before or empty, self.lstm_state or empty
        acting = {"logits": self.logits, "value": self.value, "lstm_state_before": before[0], "lstm_state": after[0]}
        return self.game_fields(self.to_env(rollout.action.numpy()), rollout.done) | acting
