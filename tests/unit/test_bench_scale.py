"""The model that `bench/scale.py` fits: a closed queueing network whose limits are known."""

from dataclasses import replace

import pytest

from bench.scale_model import Cluster, Costs, collect_time, predict

COSTS = Costs(steps=10, rollout_bytes=1e6, weights_bytes=4e6, collect=1.0, trainer=0.01)
SLOW_LINK = 1e7  # 0.1 s for a rollout, 0.4 s for the weights


@pytest.mark.parametrize(
    ("costs", "cluster", "rate", "bottleneck"),
    [
        ({}, {}, 8 / 1.01, "actors"),
        ({"learn": 0.49}, {}, 2.0, "trainer"),
        ({"learn": 0.24, "publish": 0.25}, {}, 2.0, "trainer"),
        ({"learn": 0.24, "publish": 0.25}, {"publish_every": 1e9}, 4.0, "trainer"),
        ({}, {"bandwidth": SLOW_LINK, "publish_every": 1e9}, 8 / 1.11, "actors"),
        ({}, {"bandwidth": SLOW_LINK, "publish_every": 1e9, "nodes": 9}, 1e7 / 1e6, "link in"),
        ({}, {"bandwidth": SLOW_LINK, "nodes": 8, "actors_per_node": 1}, 1e7 / 4e6, "link out"),
    ],
    ids=["actors", "gradients", "publishing", "fewer weights", "link not full", "rollouts", "weights"],
)
def test_the_rate_is_that_of_what_is_slowest(costs, cluster, rate, bottleneck):
    found = predict(replace(COSTS, **costs), Cluster(**{"nodes": 2, "actors_per_node": 4, **cluster}), rounds=60)
    assert found.bottleneck == bottleneck
    if bottleneck == "actors":
        assert 0.95 * rate < found.sps / 10 < 1.02 * rate
    else:
        assert found.sps / 10 == pytest.approx(rate, rel=0.03)
        assert found.busy[bottleneck] > 0.97


def test_a_look_at_all_requests_is_shared_by_the_rollouts_that_it_finds():
    alone = predict(replace(COSTS, wait=0.1), Cluster(1, 1), rounds=60)
    assert alone.sps == pytest.approx(10 / 1.11, rel=0.02)
    many = predict(replace(COSTS, wait=0.01, collect=0.01), Cluster(1, 50), rounds=60)  # 0.5 s for a look
    assert many.sps > 10 * 50 / (0.5 + 50 * 0.01) * 0.9


def test_the_time_of_collecting_is_found_again():
    cluster = Cluster(2, 3)
    for collect in (0.2, 2.0):
        costs = replace(COSTS, collect=collect)
        found = collect_time(replace(costs, collect=0.0), cluster, predict(costs, cluster, rounds=60).sps)
        assert found == pytest.approx(collect, rel=0.02)
