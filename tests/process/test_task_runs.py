"""Chapter 5 in all its modes: one hash for all of them, and nodes that join from elsewhere."""

import signal

import psutil
import pytest
from harness import A3C_DATA, EVALUATED, TASK
from nodes import free_port

from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.episode_log import read_episodes

SLOW = pytest.mark.slow
MODES = {"alone": ["--standalone"], "ipc": [], "tcp": ["--transport", "tcp", "--key-file", "k"]}


@pytest.mark.parametrize(
    ("collectors", "seed"), [(2, 1), *(pytest.param(*case, marks=SLOW) for case in [(1, 1), (1, 2), (2, 2)])]
)
def test_a_deterministic_run_has_the_weights_of_chapter_1_in_every_mode(run_inline, collectors, seed):
    flags = ["--deterministic", "--total-steps", "2000", "--num-actors", str(collectors), "--seed", str(seed)]
    expected = run_inline.train(A3C_DATA, *flags, name="chapter-1").summary
    assert expected["updates"] > 20
    for name, mode in MODES.items():
        done = run_inline.train(TASK, *flags, *mode, name=name, workers=None)
        assert done.code == 0, done.out + done.err
        for figure in ("steps", "episodes", "mean_return_100", "policy_lag_mean", "weights_sha256"):
            assert done.summary[figure] == expected[figure], (name, figure)


def games_of_collector_1(scripts):
    return [episode.actor for episode in read_episodes(scripts.runs_dir / "runs/r/episodes.csv")].count(1)


@SLOW
@pytest.mark.timeout(400)
def test_nodes_join_are_counted_and_leave(scripts):
    """Three collectors join in turn; two are killed and terminated, the third and an evaluator end with the task."""
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = ["--num-actors", "1", "--remote-actors", "1", *EVALUATED, "--listen", address, "--key-file", "k"]
    trainer = scripts.train(TASK, *flags, "--checkpoint-seconds", "1")
    scripts.wait_for("r", "episodes.csv:,0,", trainer)
    join = ["--attach-to", address, "--key-file", "k", "--role"]
    for number, signum, code in ((3, signal.SIGKILL, -9), (4, signal.SIGTERM, 143)):
        node = scripts.start(TASK.script, *join, "collector")
        scripts.wait_for("r", f"run.log:node.{number} joined as collector 1", trainer)
        games = games_of_collector_1(scripts)
        scripts.wait_until(lambda games=games: games_of_collector_1(scripts) > games, trainer)
        node.send_signal(signum)
        ended = scripts.finish(node, "r")
        assert (ended.code, ended.err) == (code, "")
        scripts.wait_for("r", f"run.log:node.{number}, collector 1, left", trainer)
    others = [scripts.start(TASK.script, *join, role) for role in ("collector", "evaluator")]
    scripts.wait_until(lambda: all(psutil.Process(node.pid).net_connections("tcp") for node in others), trainer)
    log = scripts.runs_dir / "runs/r/run.log"
    scripts.wait_until(lambda: log.read_text().count("joined as collector 1") == 3, trainer)
    games = games_of_collector_1(scripts)
    scripts.wait_until(lambda: games_of_collector_1(scripts) > games + 10, trainer)
    trainer.send_signal(signal.SIGINT)
    done = scripts.finish(trainer, "r")
    assert done.code == 130, done.out + done.err
    assert (done.summary["worker_restarts"], done.summary["evaluator_restarts"]) == (0, 0)
    assert sha256_of_weights(done.load(done.best)["net"]) == done.evals["best_weights_sha256"]
    for node in others:
        ended = scripts.finish(node, "r")
        assert (ended.code, ended.err) == (0, "")


@SLOW
def test_a_node_that_joins_with_another_key_is_refused_in_one_line(scripts):
    address = f"tcp://127.0.0.1:{free_port()}"
    trainer = scripts.train(TASK, "--num-actors", "1", "--listen", address, "--key-file", "k")
    scripts.wait_for("r", "episodes.csv:,0,", trainer)
    scripts.finish(
        scripts.train(TASK, "--listen", "tcp://127.0.0.1:0", "--key-file", "other", "--total-steps", "1", name="o"), "o"
    )
    node = scripts.finish(
        scripts.start(TASK.script, "--attach-to", address, "--key-file", "other", "--role", "evaluator"), "r"
    )
    assert (node.code, node.out) == (2, "")
    assert node.err.startswith("error: key-file=other: ")
    assert node.err.count("\n") == 1
    assert trainer.poll() is None
    trainer.send_signal(signal.SIGINT)
    assert scripts.finish(trainer, "r").code == 130
