"""Action masks: read from an environment's info, obeyed by every chapter, stored by the replay."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from harness import A3C_DATA, CHAPTERS, IMPALA, POPULATION, Chapter

from a3c_mp.algorithms import dqn
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.distributions import ActionHead, mask_logits
from a3c_mp.replay import Batch, EnvStep, Replay, Shards, Writer
from a3c_mp.wrappers import MaskedDiscrete, make_vec_env, mask_in
from a3c_mp.wrappers.actions import allows

ENV_ID = "envs:Masked-v0"
A = 4


@pytest.mark.parametrize(
    ("space", "given", "expected"),
    [
        (Discrete(3), np.int8([1, 0, 1]), [True, False, True]),
        (MultiDiscrete([2, 3]), (np.bool_([0, 1]), np.bool_([1, 0, 1])), [False, True, True, False, True]),
        (MultiBinary(2), np.ones(4), [True] * 4),
        (Discrete(3), [1, 0], "of 2 values, Discrete\\(3\\) has 3 choices"),
        (Discrete(2), [2, 1], r"\[2 1\], must be of 0 and 1"),
        (Discrete(2), [np.nan, 1], "must be of 0 and 1"),
        (MultiDiscrete([2, 2]), [1, 1, 0, 0], "allows no action"),
        (Box(-1, 1, (2,)), [1, 1], "which have no choices"),
    ],
    ids=str,
)
def test_a_mask_has_a_place_for_each_choice_and_is_refused_if_it_does_not_fit(space, given, expected):
    if isinstance(expected, list):
        assert mask_in({"action_mask": given}, space).tolist() == expected
        assert mask_in({}, space) is mask_in({"action_mask": None}, space) is None
    else:
        with pytest.raises(ValueError, match=f"^an action_mask .*{expected}"):
            mask_in({"action_mask": given}, space)


def test_a_vector_of_environments_keeps_its_newest_masks_and_refuses_masked_actions():
    env = make_vec_env(ENV_ID, 3, seed=0)
    obs, _ = env.reset()
    for _ in range(200):
        mask = env.mask
        assert (mask == (obs[:, 8:] > 0)).all()
        assert mask.sum(axis=1).tolist() == [4, 4, 4]
        obs, _, terminated, truncated, infos = env.step(np.array([np.flatnonzero(row)[-1] for row in mask]))
        assert not terminated.any()
        if truncated.any():
            final = infos["final_obs"][:, 8:] > 0
            assert (infos["final_mask"] == np.where(truncated[:, None], final, True)).all()
    with pytest.raises(ValueError, match=r"action \d is masked in environment 0"):
        env.step(env.mask.argmin(axis=1))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({}, {"action_mask": [1, 1]}, "an action_mask, reset\\(\\) returned none"),
        ({"action_mask": [1, 1]}, {}, "no action_mask, reset\\(\\) returned one"),
        ({"action_mask": [1, 1]}, {"action_mask": [1, 1, 1]}, "of 3 values"),
    ],
    ids=str,
)
def test_masks_come_with_every_observation_or_with_none(register, first, second, why):
    step = lambda self, _: (self.obs, 0.0, False, False, second)  # noqa: E731
    register(changes={"reset": lambda self, **_: (self.obs, first), "step": step})
    env = make_vec_env("Custom-v0", 1, seed=0)
    env.reset()
    with pytest.raises(ValueError, match=why):
        env.step(np.array([1]))


@pytest.mark.parametrize("space", [Discrete(A), MultiDiscrete([2, 2]), MultiBinary(2)], ids=str)
def test_masked_actions_have_probability_0_and_no_gradient(space):
    net = make_actor_critic(Box(-1.0, 1.0, (3,)), space)
    mask = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], np.bool_)
    raw = torch.randn(2, A, requires_grad=True)
    behaviour_logits = mask_logits(torch.randn(2, A), mask)
    policy, behaviour = net.distributions(raw, behaviour_logits)
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        assert allows(space, mask, policy.sample(rng).numpy()).all()
    assert allows(space, mask, policy.mode().numpy()).all()
    (policy.log_prob(behaviour.sample(rng)) + policy.entropy()).sum().backward()
    assert raw.grad.isfinite().all()
    assert not raw.grad[~torch.from_numpy(mask)].any()
    assert raw.grad[torch.from_numpy(mask)].any()


@pytest.mark.parametrize(
    ("logits", "mask"),
    [
        ([-2e30, -1e30, 0.0], None),
        ([-np.inf, -np.inf, -np.inf], None),
        ([-np.inf, -np.inf, 3.0], [1, 1, 0]),
        ([-2e30, -np.inf, 3.0], [1, 0, 0]),
        ([np.nan, np.nan, np.nan], [0, 1, 0]),
    ],
    ids=str,
)
def test_a_net_that_diverges_takes_allowed_actions(logits, mask):
    array = None if mask is None else np.array([mask], np.bool_)
    policy = ActionHead(Discrete(3)).distribution(mask_logits(torch.tensor([logits]), array))
    for seed in range(20):
        assert (mask or [1, 1, 1])[policy.sample(torch.Generator().manual_seed(seed)).item()]


def test_the_entropy_is_that_of_the_allowed_actions():
    head, logits = ActionHead(Discrete(3)), torch.tensor([[0.5, 2.0, -1.0]])
    masked = head.distribution(mask_logits(logits, np.array([[True, False, True]])))
    two = ActionHead(Discrete(2)).distribution(logits[:, [0, 2]])
    assert masked.entropy() == pytest.approx(two.entropy())
    assert masked.log_prob(torch.tensor([2])) == pytest.approx(two.log_prob(torch.tensor([1])))


def test_the_replay_gives_the_masks_of_next_states():
    """The mask of state t allows what the bits of t say; the final observation of the truncated game is t = 99."""
    space = MaskedDiscrete(8)
    shards = Shards(1, 1, 64, Box(-np.inf, np.inf, (1,), np.float32), space)
    writer, replay = Writer(shards, 0, n_step=2, gamma=0.9), Replay(shards, 0.0, seed=0)

    def mask_of(t):
        return (int(t) >> np.arange(8) & 1).astype(np.bool_)[None]

    no, zero = np.zeros(1, np.bool_), np.zeros(1)
    for t in range(1, 41):
        step = EnvStep(np.float32([[t]]), np.array([0]), np.ones(1), no, ~no if t == 20 else no, zero, zero)
        if t == 20:
            step = step._replace(final_obs=np.float32([[99]]), final_value=zero, final_mask=mask_of(99))
        writer.step(step._replace(mask=mask_of(t)))
    replay.ingest(0)
    batch = replay.sample(400)
    assert {99.0, 23.0} < set(batch.next_obs[:, 0].tolist())
    for state, mask in zip(batch.next_obs[:, 0], batch.next_mask, strict=True):
        assert (mask.numpy() == mask_of(state)[0]).all()


def test_double_q_chooses_among_the_allowed_actions():
    q = torch.tensor([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    zeros, mask = torch.zeros(2), torch.tensor([[True, True, True], [False, True, True]])
    batch = Batch(q, zeros.long(), zeros, zeros + 1, q, mask, zeros.double() + 1, zeros.long())
    target_net = SimpleNamespace(of_inputs=lambda inputs: torch.stack([10 * inputs, 11 * inputs], dim=2))
    net = SimpleNamespace(norm=SimpleNamespace(convert=lambda obs: obs), of_inputs=lambda inputs: inputs[..., None])
    found = dqn.bootstrap_values(None, net, target_net, batch)
    assert found.tolist() == [[50.0, 55.0], [20.0, 22.0]]


@pytest.mark.parametrize(
    ("chapter", "flags"),
    [*((chapter, []) for chapter in (*CHAPTERS, POPULATION)), (IMPALA, ["--lstm"]), (A3C_DATA, ["--deterministic"])],
    ids=lambda value: str(value) if isinstance(value, Chapter) else " ".join(value),
)
def test_no_chapter_takes_a_masked_action(run_inline, chapter, flags):
    """One would end the run: `GuardedEnvs` raises."""
    done = run_inline.train(chapter, "--env-id", ENV_ID, "--total-steps", "800", *flags)
    assert done.code == 0, done.err
    assert done.summary["updates"] > 0 == done.not_finite
    assert "Discrete(8) masked" in done.log
    played = run_inline("play.py", "runs/r", "--episodes", "5", "--sampled")
    assert played.code == 0, played.err
    assert "games of 32 steps" in played.out


def test_masks_of_several_choices_are_obeyed(run_inline, register):
    taken, info = [], {"action_mask": (np.int8([0, 1]), np.int8([1, 0, 1, 1]))}

    def step(self, action):
        taken.append(action.tolist())
        return self.obs, 1.0, True, False, info

    changes = {"action_space": MultiDiscrete([2, 4]), "step": step, "reset": lambda self, **_: (self.obs, info)}
    register(changes=changes)
    done = run_inline.train(A3C_DATA, "--env-id", "Custom-v0", "--total-steps", "64")
    assert done.code == 0, done.err
    assert run_inline("play.py", "runs/r", "--episodes", "3").code == 0
    assert {tuple(action) for action in taken} == {(1, 0), (1, 2), (1, 3)}
