"""The policies in zoo/: their files are what their cards say, and they play as well; the large ones with -m slow."""

import json
import statistics

import pytest
from harness import ROOT

from a3c_mp.api.policy import load_run
from a3c_mp.run.checkpoint import sha256_of_weights
from bench import zoo

pytest.importorskip("safetensors")

SMALL = ("CartPole-v1", "LunarLander-v3", "Pendulum-v1")
MOST_BYTES = 8 * 2**20


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_card_is_that_of_its_policy(name):
    path = zoo.path_of(name)
    card, run = zoo.read_card(path), load_run(path)
    assert (run.env_id, run.state["steps"]) == (name, card["steps"])
    assert sha256_of_weights(run.state["net"]) == card["weights_sha256"]
    assert card["score"] >= zoo.ZOO[name].aim
    assert card["command"] == " ".join(["python", *zoo.ZOO[name].command(name)])


def test_the_zoo_is_small_and_its_table_that_of_the_cards():
    assert sum(path.stat().st_size for path in (ROOT / "zoo").iterdir()) <= MOST_BYTES
    assert (ROOT / "zoo" / "README.md").read_text().endswith(f"\n{zoo.table(list(zoo.ZOO))}\n")


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in zoo.ZOO]
)
def test_a_policy_plays_as_well_as_its_card_says(name):
    if name == "LunarLander-v3":
        pytest.importorskip("Box2D")
    aim = zoo.ZOO[name].aim
    assert statistics.fmean(zoo.score(zoo.path_of(name), 10 if name in SMALL else zoo.GAMES)) >= aim


def test_a_policy_that_was_trained_again_is_compared_by_bits_or_by_score():
    card = zoo.read_card(zoo.path_of("CartPole-v1"))
    assert zoo.verdict("CartPole-v1", card, card)[1]
    assert not zoo.verdict("CartPole-v1", card | {"weights_sha256": "0" * 64}, card)[1]
    other = json.loads(json.dumps(card)) | {"weights_sha256": "0" * 64, "processor": "another"}
    assert zoo.verdict("CartPole-v1", other, card)[1]
    assert not zoo.verdict("CartPole-v1", other | {"score": 100.0}, card)[1]
