"""The replay against a literal one: lists of episodes, n-step returns by a loop, stacks by a deque."""

import io
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.errors import ConfigError
from a3c_mp.replay import EnvStep, Prefetch, Replay, Shards, Writer, importance_weights
from a3c_mp.replay.writer import MIN_PRIORITY

GAMMA, SCALE = 0.9, 0.5
ROOM = 8
"""rows of room that a block of ROOM // 2 steps needs"""


class Step(NamedTuple):
    stack: np.ndarray
    number: int  # unique; also the action
    reward: float
    q: float
    value: float


@dataclass
class Episode:
    """One episode of one environment, as lists."""

    steps: list[Step] = field(default_factory=list)
    cuts: set[int] = field(default_factory=set)  # steps after which the return is cut
    final: tuple[np.ndarray, float] | None = None  # (stack, value) where it was truncated

    def transition(self, t, n):
        """(reward, discount, next stack, priority) of the transition that begins at step t; None if not complete."""
        total, discount = 0.0, 1.0
        for i in range(n):
            if t + i == len(self.steps):
                break
            total += discount * self.steps[t + i].reward
            discount *= GAMMA
            if t + i in self.cuts:
                return total, 0.0, self.steps[t].stack, abs(SCALE * total - self.steps[t].q)
        end = t + i + (t + i < len(self.steps))
        if end - t == n and end < len(self.steps):
            stack, value = self.steps[end].stack, self.steps[end].value
        elif end == len(self.steps) and self.final is not None:
            stack, value = self.final
        else:
            return None
        return total, discount, stack, abs(SCALE * total + discount * value - self.steps[t].q)


class Stream:
    """Random episodes written to one shard of a replay and kept literally."""

    def __init__(self, shards, shard, n, rng, mean_length=6):
        self.shards, self.shard, self.n, self.rng, self.mean_length = shards, shard, n, rng, mean_length
        self.number = shard * 10**6
        self.lanes: list[list[Episode]] = [[] for _ in range(shards.num_envs)]
        self.restart()

    def restart(self):
        """A new actor: what the old one had started stays as it is."""
        self.writer = Writer(self.shards, self.shard, self.n, GAMMA)
        self.writer.reward_scale = SCALE
        self.frames = [self.first_frames(b) for b in range(self.shards.num_envs)]

    def frame(self):
        self.number += 1
        return np.full(2, self.number, np.float32)

    def first_frames(self, b):
        self.lanes[b].append(Episode())
        return deque([np.zeros(2, np.float32)] * (self.shards.stack - 1) + [self.frame()], maxlen=self.shards.stack)

    def step(self):
        num_envs, rng = self.shards.num_envs, self.rng
        stacks = np.stack([np.stack(frames) for frames in self.frames])
        reward, q, value, final_value = rng.normal(size=(4, num_envs)).astype(np.float32)
        terminated, truncated, life_lost = rng.random((3, num_envs)) < 0.5 / self.mean_length
        final_obs, numbers = np.full_like(stacks, np.nan), []
        for b, frames in enumerate(self.frames):
            episode = self.lanes[b][-1]
            numbers.append(self.number + 1)
            episode.steps.append(Step(stacks[b], numbers[-1], float(reward[b]), float(q[b]), float(value[b])))
            if terminated[b] or life_lost[b]:
                episode.cuts.add(len(episode.steps) - 1)
            frames.append(self.frame())
            if truncated[b] and not terminated[b]:
                final_obs[b] = np.stack(frames)
                episode.final = final_obs[b], float(final_value[b])
            if terminated[b] or truncated[b]:
                self.frames[b] = self.first_frames(b)
        final_value[~truncated] = np.nan
        obs = stacks if self.shards.stack > 1 else stacks[:, 0]
        final_obs = final_obs if self.shards.stack > 1 else final_obs[:, 0]
        ends = {"final_obs": final_obs, "final_value": final_value, "life_lost": life_lost}
        self.writer.step(EnvStep(obs, np.array(numbers), reward, terminated, truncated, q, value, **ends))

    def transitions(self):
        """For each lane, (number, stack, reward, discount, next stack, priority) of what is complete, in order."""
        return [
            [
                (step.number, step.stack, *rest)
                for episode in episodes
                for t, step in enumerate(episode.steps)
                if (rest := episode.transition(t, self.n)) is not None
            ]
            for episodes in self.lanes
        ]


def make_shards(num_shards=2, num_envs=2, rows=40, stack=3):
    obs_space = Box(-np.inf, np.inf, (stack, 2) if stack > 1 else (2,), np.float32)
    return Shards(num_shards, num_envs, rows, obs_space, Discrete(10), stack)


def make(alpha=0.0, num_shards=2, mean_length=6, **sizes):
    """(Replay, its memory, a stream for each shard)."""
    shards = make_shards(num_shards, **sizes)
    rngs = map(np.random.default_rng, range(num_shards))
    streams = [Stream(shards, shard, 3, rng, mean_length) for shard, rng in enumerate(rngs)]
    return Replay(shards, alpha, 0), shards, streams


def filled_replay():
    replay, _, streams = make(0.6)
    run(streams, replay, 10)
    return replay


def run(streams, replay, blocks, restarts=0.0):
    """Blocks of steps of every stream, with room made and rows announced in between."""
    for _ in range(blocks):
        for stream in streams:
            replay.make_room(stream.shard, ROOM)
            for _ in range(int(stream.rng.integers(ROOM // 2 + 1))):
                stream.step()
            if stream.rng.random() < restarts:
                stream.restart()
            replay.ingest(stream.shard)


def draw_all(replay):
    """A batch with every transition that can be drawn in it, once or more. Uniform sampling makes it certain."""
    assert replay.priority_exponent == 0
    return replay.sample(2 * replay.size)


def leaves_of(replay, ids):
    row, lane = np.divmod(np.asarray(ids), replay.shards.num_lanes)
    return lane * replay.shards.rows + row % replay.shards.rows


def check_literally(replay, streams):
    """What can be drawn is the newest of what is complete, and every field of it is right."""
    batch = draw_all(replay)
    drawn = {int(number): i for i, number in enumerate(batch.action)}
    assert len(drawn) == replay.size
    priorities = replay.shards.priority.ravel()[leaves_of(replay, batch.ids)]
    for stream in streams:
        for episodes in stream.transitions():
            live = [transition for transition in episodes if transition[0] in drawn]
            assert [t[0] for t in live] == [t[0] for t in episodes[len(episodes) - len(live) :]], "the newest are kept"
            for number, stack, reward, discount, next_stack, priority in live:
                i = drawn.pop(number)
                np.testing.assert_array_equal(batch.obs[i].reshape(stack.shape), stack)
                np.testing.assert_array_equal(batch.next_obs[i].reshape(stack.shape), next_stack)
                assert float(batch.reward[i]) == pytest.approx(reward, abs=1e-5)
                assert float(batch.discount[i]) == pytest.approx(discount, rel=1e-6)
                assert priorities[i] == pytest.approx(priority + MIN_PRIORITY, abs=1e-5)
    assert not drawn, "nothing else can be drawn"


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1.5, 4, 30]), st.integers(0, 2**32 - 1)
)
def test_every_transition_agrees_with_the_literal_one(n, stack, num_envs, mean_length, seed):
    rng = np.random.default_rng(seed)
    shards = make_shards(num_envs=num_envs, rows=int(rng.integers(20, 60)), stack=stack)
    replay = Replay(shards, 0.0, seed)
    streams = [Stream(shards, shard, n, rng, mean_length) for shard in range(2)]
    for _ in range(3):
        run(streams, replay, blocks=int(rng.integers(1, 20)), restarts=0.1)
        if replay.size:
            check_literally(replay, streams)


def test_lanes_keep_as_much_as_they_can():
    replay, shards, streams = make(rows=200, mean_length=1e9)
    run(streams, replay, blocks=150)
    assert (shards.written > 250).all(), "the lanes have wrapped around"
    most = shards.rows * shards.num_lanes
    lost = ROOM + (shards.stack - 1) + 3  # room, frames that only serve stacks, returns that are not complete
    assert most - shards.num_lanes * lost <= replay.size < most


def chi_square(counts, weights):
    """Statistic of observed counts, in standard deviations from its mean: about N(0, 1), stratified draws give less."""
    used = weights > 0
    assert counts[~used].sum() == 0
    expected = counts.sum() * weights[used] / weights.sum()
    freedom = used.sum() - 1
    return (((counts[used] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("batch_size", [16, 256])
def test_frequencies_match_priorities_over_all_shards(batch_size):
    alpha = 0.6
    replay, shards, streams = make(alpha, num_shards=3)
    run(streams[:1], replay, 20)  # shards of different fullness and sums, all wrapped around
    run(streams, replay, 30)
    assert (shards.written > shards.rows).all()
    uniform = Replay(shards, 0.0, 0)
    uniform.tail[:] = replay.tail
    for shard in range(3):
        uniform.ingest(shard)
    assert uniform.size == replay.size
    ids = torch.unique(draw_all(uniform).ids)
    priority, leaves = np.zeros(replay.tree.capacity), leaves_of(replay, ids)
    priority[leaves] = shards.priority.ravel()[leaves]
    rng = np.random.default_rng(0)
    for update in (False, True):
        if update:
            chosen = rng.choice(ids, len(ids) // 2, replace=False)
            new = rng.exponential(size=len(chosen)) ** 3
            replay.update(torch.from_numpy(chosen), new)
            priority[leaves_of(replay, chosen)] = new + MIN_PRIORITY
        drawn = [leaves_of(replay, replay.sample(batch_size).ids) for _ in range(16_000 // batch_size)]
        counts = np.bincount(np.concatenate(drawn), minlength=len(priority))
        assert chi_square(counts, priority**alpha) < 4
        assert chi_square(counts, priority ** (alpha**2)) > 8, "the exponent is applied once"


def test_probabilities_and_weights_are_those_of_the_paper():
    replay, _, streams = make(0.7)
    run(streams, replay, 10)
    batch = replay.sample(32)
    leaves = replay.tree.leaves
    expected = leaves[leaves_of(replay, batch.ids)] / leaves.sum()
    np.testing.assert_allclose(batch.probability, expected)
    literal = (replay.size * expected) ** -0.4
    np.testing.assert_allclose(importance_weights(batch.probability, 0.4), literal / literal.max(), rtol=1e-6)
    assert importance_weights(batch.probability, 0.0).tolist() == [1.0] * 32


def test_a_stale_priority_is_dropped_and_counted():
    replay, shards, streams = make(1.0, num_shards=1, num_envs=1, rows=30)
    run(streams, replay, 8)
    old = torch.unique(replay.sample(200).ids)
    while (replay.tail <= int(old[0])).any():  # with one lane an id is a row
        run(streams, replay, 1)
    retired = int((old < int(replay.tail[0])).sum())
    assert 0 < retired < len(old)
    before = replay.tree.leaves.copy()
    replay.update(old, torch.full((len(old),), 7.0))
    assert replay.dropped == retired
    before[old[retired:].numpy() % shards.rows] = 7.0
    np.testing.assert_allclose(replay.tree.leaves, before, rtol=1e-5)


def test_rows_retired_while_they_are_gathered_are_replaced(monkeypatch):
    replay, shards, streams = make(num_shards=1, num_envs=1, rows=60)
    run(streams, replay, 40)
    gather, before = shards.gather, replay.size

    def gather_slowly(*args):
        gather(*args)
        if replay.size == before:
            replay.make_room(0, 30)
            shards.frame[0, np.arange(shards.written[0], shards.writable_until[0]) % shards.rows] = -1.0  # a fast actor

    monkeypatch.setattr(shards, "gather", gather_slowly)
    batch = replay.sample(64)
    assert replay.size < before
    assert (batch.ids >= int(replay.tail[0])).all()
    assert (batch.obs >= 0).all()
    assert (batch.next_obs >= 0).all()
    monkeypatch.undo()
    check_literally(replay, streams)


def test_a_writer_without_room_says_so_and_spoils_nothing():
    replay, shards, (stream,) = make(num_shards=1, rows=20, mean_length=1e9)
    for _ in range(20):
        stream.step()
    before = {name: array.clone() for name, array in shards.fields().items()}
    with pytest.raises(RuntimeError, match="make_room"):
        stream.step()
    assert all(torch.equal(before[name], array) for name, array in shards.fields().items())
    replay.ingest(0)
    assert replay.size == 2 * 17
    replay.make_room(0, 3)
    assert replay.size == 2 * (17 - 5), "without three rows, and the two whose stacks reach into them"
    for _ in range(3):
        stream.step()
    with pytest.raises(RuntimeError, match="make_room"):
        stream.step()


@pytest.mark.parametrize("blocks", [5, 60], ids=["before lanes wrap around", "after"])
def test_what_is_saved_goes_on(blocks):
    replay, _, streams = make(0.6, rows=50)
    run(streams, replay, blocks)
    replay.update(replay.sample(50).ids, torch.rand(50))
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    again, again_shards, _ = make(0.6, rows=50)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.size == replay.size
    for one, other in zip(replay.sample(64), again.sample(64), strict=True):
        assert torch.equal(one, other)
    again.priority_exponent = 0.0  # for draw_all, of what is announced from here on
    again.tree[np.flatnonzero(again.tree.leaves)] = 1.0
    for stream in streams:
        stream.shards = again_shards
        stream.restart()
    run(streams, again, 40)
    check_literally(again, streams)


def test_priorities_of_a_saved_replay_get_the_exponent_of_now():
    state = filled_replay().state_dict()
    again, _, _ = make(0.3)
    again.load_state_dict(state)
    np.testing.assert_allclose(again.state_dict()["leaves"] ** 2, state["leaves"], rtol=1e-6)
    uniform, _, _ = make(0.0)
    uniform.load_state_dict(state)
    assert set(uniform.tree.leaves) <= {0.0, 1.0}
    assert uniform.size == again.size
    again.load_state_dict(uniform.state_dict())
    assert set(again.tree.leaves) == {0.0, 1.0}, "it had no priorities"
    with pytest.raises(ConfigError, match="51"):
        make(rows=51)[0].load_state_dict(state)


def test_transitions_without_a_finite_priority_are_left_out_and_counted():
    replay, shards, streams = make(num_shards=1)
    run(streams, replay, 4)
    shards.priority[:] = np.nan
    replay.seen[:] = replay.tail[:] = 0
    size = replay.size
    assert (replay.ingest(0), replay.size, replay.rejected) == (0, size, int(shards.committed.sum()))


def test_an_outlier_counts_as_the_largest_error_in_its_first_priority_and_infinity_is_left_out():
    shards = Shards(1, 4, 20, Box(-1, 1, (3,), np.float32), Discrete(2))
    writer, replay = Writer(shards, 0, 1, GAMMA), Replay(shards, 1.0, 0)
    writer.largest_error = 10.0
    for _ in range(2):
        obs, reward = np.zeros((4, 3), np.float32), np.array([0.5, -1e9, 30.0, np.inf])
        writer.step(EnvStep(obs, np.zeros(4, np.int64), reward, *np.zeros((2, 4), bool), *np.zeros((2, 4))))
    assert (replay.ingest(0), replay.rejected) == (3, 1)
    assert shards.priority[:3, 0].tolist() == pytest.approx([0.5, 10.0, 10.0], abs=1e-5)


def test_the_memory_is_what_was_computed():
    spaces = Box(0, 255, (4, 84, 84), np.uint8), Discrete(6)
    needed = Shards.bytes_needed(2, 3, 100, *spaces, 4)
    assert needed == Shards(2, 3, 100, *spaces, 4).slots.slot_bytes
    assert needed / 600 == pytest.approx(84 * 84 + 28, rel=0.001), "one frame for each transition"


def test_continuous_actions():
    shards = Shards(1, 2, 20, Box(-1, 1, (3,), np.float32), Box(-1, 1, (2,), np.float32))
    writer, replay = Writer(shards, 0, 1, GAMMA), Replay(shards, 0.0, 0)
    for t in range(5):
        action, nothing_ends = np.full((2, 2), t / 10, np.float32), np.zeros((2, 2), bool)
        writer.step(EnvStep(np.full((2, 3), t), action, np.zeros(2), *nothing_ends, *np.zeros((2, 2))))
    assert replay.ingest(0) == 8
    batch = draw_all(replay)
    assert (batch.action.shape, batch.action.dtype) == ((16, 2), torch.float32)
    torch.testing.assert_close(batch.action[:, 0], batch.obs[:, 0] / 10)
    torch.testing.assert_close(batch.next_obs, batch.obs + 1)
    replay.update(batch.ids, torch.zeros(16))
    assert {*draw_all(replay).ids.tolist()} == {*batch.ids.tolist()}, "an error of 0 does not retire a transition"


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_sampled_ahead_are_the_same_and_the_callers_until_the_next_one(ahead):
    expected = filled_replay()
    with Prefetch(filled_replay(), 16, ahead) as batches:
        for _ in range(20):
            batch = batches.next()
            for waiting in batches._batches:  # the thread has filled all it may
                waiting.result()
            assert all(torch.equal(*pair) for pair in zip(batch, expected.sample(16), strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")], "it has ended"


@pytest.mark.parametrize("ahead", [0, 2])
def test_errors_come_through_every_time(ahead):
    with Prefetch(make(0.6)[0], 16, ahead) as batches:
        for _ in range(3):
            with pytest.raises(ValueError, match="all leaves are 0"):
                batches.next()
