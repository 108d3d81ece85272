"""Bursts: some environments repeat a random action for a while."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from harness import A3C_DATA, A3C_GRAD, IMPALA, row_id

from a3c_mp.data.exploration import FREQUENCY, Bursts
from a3c_mp.nets.distributions import MASKED, Categorical, MultiCategorical
from a3c_mp.run.episode_log import read_episodes


def runs_of(column):
    """(action, length) of each burst in a column [T] of -1 and actions, where bursts do not touch."""
    edges = np.flatnonzero(np.diff(column, prepend=-2, append=-2))
    return [(column[start], end - start) for start, end in pairwise(edges) if column[start] >= 0]


def test_bursts_repeat_one_action_in_the_environments_that_explore():
    bursts = Bursts(np.array([True, False, True]), longest=20, sizes=[100])
    bursts.draw(seed=3, unroll_length=100_000)
    held = bursts.held[:, :, 0].numpy()
    assert (held[:, 1] == -1).all()
    found = runs_of(held[:, 0])
    actions, lengths = np.array(found).T
    assert lengths.max() == 20
    assert lengths.mean() == pytest.approx(10.5, rel=0.05)
    assert len(found) == pytest.approx(100_000 / (1 / FREQUENCY + 10.5), rel=0.1)
    assert set(actions) == set(range(100))
    assert not (held[:, 0] == held[:, 2]).all()


def test_the_same_seed_draws_the_same_bursts():
    drawn = []
    for seed in (1, 1, 2):
        bursts = Bursts(np.ones(4, np.bool_), longest=5, sizes=[3, 2])
        bursts.draw(seed, 200)
        drawn.append(bursts.held)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_policy_of_a_burst_is_certain_of_its_action():
    bursts = Bursts(np.ones(3, np.bool_), longest=5, sizes=[3])
    bursts.held = torch.tensor([[[2], [-1], [0]]])
    logits = torch.randn(3, 3)
    logits[2, 1] = MASKED
    applied = Categorical(bursts.apply(0, logits))
    assert applied.log_prob(torch.tensor([2, 0, 0]))[[0, 2]].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert torch.equal(applied.logits[1], logits[1]), "the policy acts"
    assert applied.logits[2, 1] == MASKED
    assert applied.sample(torch.Generator())[0] == 2


def test_an_action_that_is_masked_is_not_repeated():
    bursts = Bursts(np.ones(2, np.bool_), longest=5, sizes=[2, 3])
    bursts.held = torch.tensor([[[1, 2], [0, 1]]])
    logits = torch.zeros(2, 5)
    logits[0, 4] = MASKED  # the third choice of the second part
    applied = bursts.apply(0, logits)
    assert torch.equal(applied[0], logits[0])
    assert MultiCategorical(applied, (2,), [2, 3]).mode()[1].tolist() == [0, 1]


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA], ids=row_id)
def test_games_of_environments_that_explore_do_not_enter_the_mean_return(chapter, run_inline):
    """Half of the environments explore, so about half of the games count."""
    flags = ["--env-id", "envs:Count-v0", "--total-steps", "1600"]
    games = []
    for share in ("0", "0.5"):
        done = run_inline.train(chapter, *flags, "--explore-envs", share, name=f"r{share}")
        assert done.code == 0, done.err
        games.append(len(read_episodes(done.folder / "episodes.csv")))
    assert games[0] / 3 < games[1] < games[0] * 2 / 3, games
