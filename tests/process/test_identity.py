"""Environments that are simulators, each with a port of its own, in all processes of a run and in play.py."""

import os
import re

import pytest
from harness import A3C_DATA, APEX_DQN, POPULATION, TASK

from a3c_mp.wrappers import split_id, with_kwargs

PORTS = 12_000 + 60 * (os.getpid() % 300)
SIMULATORS = [
    *("--env-id", "envs:Simulator-v0", "--total-steps", "600"),
    *("--env-kwargs", f"port={{{PORTS}+10*actor+env}}", "name=sim{actor}"),
]
FEW = ["--num-actors", "2", "--eval-every", "200", "--eval-episodes", "2"]
LEARNERS = ["--num-learners", "2", "--learning-starts", "100"]
SLOW = pytest.mark.slow
ROWS = {
    "actors": (A3C_DATA, FEW, ("worker-0", "worker-1")),
    "several learners": (APEX_DQN, [*FEW, *LEARNERS], ("worker-0", "worker-0")),
    "nodes": (TASK, FEW, ("collector-0", "collector-1")),
    "members": (POPULATION, ["--eval-episodes", "3"], ("worker-0", "worker-1")),
}


@pytest.mark.parametrize(
    ("chapter", "flags", "names"),
    [pytest.param(*row, id=name, marks=() if name in ("actors", "nodes") else SLOW) for name, row in ROWS.items()],
)
def test_every_environment_of_a_run_can_have_a_port_of_its_own(run_inline, tmp_path, chapter, flags, names):
    done = run_inline.train(chapter, *flags, *SIMULATORS, workers=None)
    assert done.code == 0, done.log
    opened = {tuple(path.name.split("_")) for path in tmp_path.glob("*_sim*")}
    assert all(int(port) == PORTS + 10 * int(actor) + int(env) for port, _, actor, env, _ in opened)
    assert all(name == f"sim{actor}" for _, name, actor, _, _ in opened)
    seen = {(int(actor), int(env), process) for _, _, actor, env, process in opened}
    expected = {(actor, env, name) for actor, name in enumerate(names) for env in range(4)}
    if chapter is not POPULATION:  # its members play the evaluation games, too
        expected |= {(-1, 0, "evaluator"), (-1, 1, "evaluator")}
    assert {each for each in seen if each[0] > -2} == expected
    run_inline("play.py", "runs/r", "--episodes", "2", "--video", "game.mp4")
    rows = {tuple(map(int, path.name.split("_")[2:4])) for path in tmp_path.glob("*MainProcess")}
    assert rows == {(-2, 0), (-2, 1), (-3, 0)}


def test_braces_in_keyword_arguments(monkeypatch):
    monkeypatch.setenv("A3C_ACTOR", "3")
    monkeypatch.setenv("A3C_ENV", "12")
    values = {
        "{9000+100*actor+env}": 9312,
        "{ 100 * (actor // 2) - env % 5 }": 98,
        "sim-{actor}-{env}": "sim-3-12",
        '{"port": {env}, "env": 1}': {"port": 12, "env": 1},
        "{name}-{size+1}": "{name}-{size+1}",
        "{env: 1}": "{env: 1}",
    }
    for text, value in values.items():
        assert split_id(with_kwargs("X-v0", [f"a={text}"]))[1] == {"a": value}
    for bad in ("{actor+port}", "{9**9**actor}", "{env +}", "{10//(env-12)}", "{actor if env else 0}", "{actor()}"):
        with pytest.raises(ValueError, match=re.escape(f"{bad} must be of actor, env, whole numbers and + -")):
            with_kwargs("X-v0", [f"a={bad}"])
        with pytest.raises(ValueError, match="must be of actor"):
            with_kwargs(f"X-v0?a={bad.replace('+', '%2B')}", [])
