"""The benchmark of the replay feeds it what real environments would, and fills it to the size it says."""

import pytest
import torch

from a3c_mp.replay import Replay, Shards, Writer
from bench import replay as bench


def test_lanes_are_long_enough_for_the_size_that_is_measured():
    size, num_envs = 600, 2
    shards = Shards(2, num_envs, bench.lane_rows(size, num_envs), bench.OBS_SPACE, bench.ACTION_SPACE, bench.STACK)
    replay = Replay(shards, bench.ALPHA, 0)
    for shard in range(2):
        writer, environments = Writer(shards, shard, bench.N_STEP, bench.GAMMA), bench.Environments(num_envs)
        for _ in range(2 * shards.rows // bench.BLOCK):
            replay.make_room(shard, 2 * bench.BLOCK)
            for _ in range(bench.BLOCK):
                writer.step(environments.step())
            replay.ingest(shard)
    assert size <= replay.size < size + shards.num_lanes * 2 * 2 * bench.BLOCK
    batch = replay.sample(64)
    full = (batch.obs.flatten(2) > 0).any(dim=2).all(dim=1) & (batch.discount > 0)
    assert full.any()
    assert torch.equal(batch.obs[full, -1], batch.next_obs[full, 0]), "pictures move by a frame a step, three in all"


def test_rates_are_of_what_was_done():
    calls = []

    def work():
        calls.append(sum(range(20_000)))
        return 3

    rate = bench.rate(work, 0.1)
    assert rate == pytest.approx(3 * (len(calls) - 1) / 0.1, rel=0.2)
