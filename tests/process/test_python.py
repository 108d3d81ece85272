"""The library from Python: runs as child processes, callbacks, errors, and policies as functions."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path

import envs
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from harness import BUSY_SECONDS, IMPALA, ROOT, default_signals

import a3c_mp
from a3c_mp import _bootstrap, wrappers
from a3c_mp.api import policy, training
from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.run import followed

CHAPTER = """
import a3c_mp, json, os, signal, sys
from pathlib import Path
from a3c_mp.run.followed import tell

folder, how = Path("r").absolute(), sys.argv[1]
if how == "--how=leave":
    sys.exit(1)
folder.mkdir(exist_ok=True)

def end(reason, code):
    end = {"solved": reason == "solved", "steps": 7, "mean_return_100": 1.5, "exit_reason": reason}
    (folder / "summary.json").write_text(json.dumps(end))
    sys.exit(code)

if signal.SIGTERM not in a3c_mp._bootstrap.IGNORED_AT_START:  # as a run does
    signal.signal(signal.SIGTERM, lambda *_: how == "--how=stuck" or end("SIGTERM", 143))
tell(folder=str(folder))
print(*sys.argv[2:])
(folder / "pid").write_text(str(os.getpid()))
tell(steps=5, metrics={"losses/total": 1.0})
Path(os.environ["A3C_MP_FOLLOWED"], "0.tmp").write_text('{"steps": 4')  # the disk is full
tell(steps=3, metrics={"eval/return_mean": 2.0})
if how == "--how=wait":
    signal.pause()
if how == "--how=stuck":
    signal.pause(), signal.pause()
if how == "--how=kill":
    (folder / "summary.json").write_text('{"exit_reason": "solved"}')  # of an earlier start
    os.kill(os.getpid(), signal.SIGKILL)
end(*("error: none", 1) if how == "--how=fail" else ("solved", int(how == "--how=full")))
"""
"""a chapter that learns nothing"""


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_chapter.py").write_text(CHAPTER)
    return "my_chapter.py"


class Recorder(a3c_mp.Callback):
    """Remembers what it is called with; the hook called `stops` gives or raises `answer`."""

    def __init__(self, stops="", answer=None):
        self.calls, self.stops, self.answer = [], stops, answer

    def _record(self, name, *what):
        self.calls.append((name, *what))
        if name == self.stops and isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if name == self.stops else None

    def on_update(self, *what):
        return self._record("update", *what)

    def on_evaluation(self, *what):
        return self._record("evaluation", *what)

    def on_end(self, *what):
        self._record("end", *what)


CALLS = [("update", 5, {"losses/total": 1.0}), ("evaluation", 3, {"eval/return_mean": 2.0})]


def is_left(folder):
    """Whether the process of a run is still there after a while."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.wait_procs([psutil.Process(int((folder / "r/pid").read_text()))], BUSY_SECONDS)[1])
    return False


def test_callbacks_hear_of_a_run_and_its_result_says_how_it_ended(chapter, tmp_path, capfd):
    callbacks = [Recorder(), Recorder()]
    a3c_mp.train(chapter, how="end", net=make_count, wrapper=[Recorder, "m:W,x=1"])
    flags = ["--net=test_python:make_count", "--wrapper", "test_python:Recorder", "m:W,x=1"]
    assert capfd.readouterr().out.split() == flags
    result = a3c_mp.train(chapter, how="end", callbacks=callbacks, quiet=True)
    assert not capfd.readouterr().out
    assert [callback.calls for callback in callbacks] == 2 * [[*CALLS, ("end", result)]]
    assert (result.folder, result.solved, result.steps, result.mean_return) == (tmp_path / "r", True, 7, 1.5)
    assert result.exit_reason == result.summary["exit_reason"] == "solved"


def test_a_confirmation_is_no_evaluation():
    recorder = Recorder()
    assert training.call_hooks([recorder], 4, {"eval/confirmed_mean": 2.0})
    assert not recorder.calls


def test_a_mask_may_be_in_parts_as_an_environment_gives_it():
    one, seen = policy.TrainedPolicy.__new__(policy.TrainedPolicy), []
    vars(one).update(obs_space=Box(-1.0, 1.0, (3,)), action_space=MultiDiscrete([2, 3]), _num=0)
    vars(one)["_act"] = lambda obs, starts, mask: seen.append(mask) or np.zeros((1, 2))
    one(np.zeros(3), mask=(np.array([1, 0]), np.array([0, 1, 1])))
    one(np.zeros((2, 3)), mask=[[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]])
    assert [masks.astype(int).tolist() for masks in seen] == [[[1, 0, 0, 1, 1]], [[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]]]


@pytest.mark.parametrize(
    ("space", "obs", "mask", "message"),
    [
        (Box(-1.0, 1.0, (3,)), np.zeros((5, 3)), [1, 0, 1, 1, 1], "an action_mask of 1 values"),
        (Box(-1.0, 1.0, (3,)), np.zeros((2, 3)), [[1, 0, 1, 1, 1]], "1 masks for 2 observations"),
        (Box(-1.0, 1.0, (3,)), np.zeros(3), [1, 0, 0, 0, 0], "an action_mask that allows no action"),
        (Box(0, 255, (3, 36, 36), np.uint8), np.full((3, 36, 36), 0.7), None, "must be uint8 as `make_env` gives them"),
        (Box(-1.0, 1.0, (3,)), {"a": np.zeros(3)}, None, "as `make_env` gives them, not a dict"),
        (Box(-1.0, 1.0, (3,)), (np.zeros(2), 1), None, "as `make_env` gives them, not a tuple"),
    ],
)
def test_observations_and_masks_that_do_not_fit_are_refused(space, obs, mask, message):
    one = policy.TrainedPolicy.__new__(policy.TrainedPolicy)
    vars(one).update(obs_space=space, action_space=MultiDiscrete([2, 3]), _num=0)
    with pytest.raises(ValueError, match=message):
        one(obs, mask=mask)


@pytest.mark.parametrize(("hook", "how"), [("update", signal.SIG_DFL), ("evaluation", signal.SIG_IGN)])
def test_a_callback_ends_a_run_with_what_it_has_learned(chapter, hook, how, request):
    """Also where the program ignores the signal that it ends the run by."""
    request.addfinalizer(functools.partial(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, how)))
    first, second = Recorder(hook, False), Recorder()
    result = a3c_mp.train(chapter, how="wait", callbacks=[first, second])
    assert result.exit_reason == "callback"
    assert first.calls == second.calls == [*CALLS[: 1 + (hook == "evaluation")], ("end", result)]


def test_a_run_that_a_callback_has_ended_and_that_does_not_end_is_killed(chapter, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "END_SECONDS", 1.0)
    with pytest.raises(TrainingError, match=r"^it was killed by SIGKILL; see .*/r/run.log"):
        a3c_mp.train(chapter, how="stuck", callbacks=Recorder("evaluation", False))
    assert not is_left(tmp_path)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_a_callback_ends_the_run_and_is_raised(chapter, tmp_path, error):
    with pytest.raises(type(error)):
        a3c_mp.train(chapter, how="wait", callbacks=Recorder("evaluation", error))
    assert not is_left(tmp_path)
    assert "SIGTERM" in (tmp_path / "r/summary.json").read_text()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"it was killed by SIGKILL; see .*/r/run.log"),
        ("fail", r"error: none; see .*/r/run.log"),
        ("full", r"solved, but its last state was not saved; see .*/r/run.log"),
        ("leave", r"it ended with code 1 before it began, see its output"),
    ],
)
def test_a_run_that_fails_is_an_error(chapter, how, message):
    Path("summary.json").write_text('{"solved": true}')  # of something else, in the current folder
    with pytest.raises(TrainingError, match=message):
        a3c_mp.train(chapter, how=how, callbacks=(recorder := Recorder()))
    assert "end" not in [call[0] for call in recorder.calls]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_run_ends_with_the_program_that_started_it(chapter, scripts, signum, tmp_path):
    program = "import a3c_mp; a3c_mp.train('my_chapter.py', how='wait')"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}  # a killed program leaves a temporary folder
    flags = {"env": env, "stderr": subprocess.DEVNULL, "preexec_fn": default_signals}
    process = subprocess.Popen([sys.executable, "-c", program], **flags)
    try:
        scripts.wait_until((tmp_path / "r/pid").exists, process)
        process.send_signal(signum)
        assert process.wait(60) != 0
        assert not is_left(tmp_path)
        assert "SIGTERM" in (tmp_path / "r/summary.json").read_text()
    finally:
        process.kill()


# ---- what is refused


def in_a_cell():
    """A class as a notebook has it, where `__main__` is no file."""
    return type("Mine", (gymnasium.Env,), {"__module__": "__main__", "__qualname__": "Mine"})


@pytest.mark.parametrize(
    ("chapter", "settings", "message"),
    [
        ("a3c", {}, "chapter=a3c: must be one of a3c_data, a3c_grad, apex, .*, or a script"),
        ("a3c_data", {"env_id": in_a_cell()}, "env-id=Mine: .* notebook's cell .*%%writefile my_envs.py.*my_envs.Mine"),
        ("a3c_data", {"env_id": lambda: None}, "env-id=<lambda>: .* inside a function"),
        ("a3c_data", {"env_id": Recorder._record}, "env-id=Recorder._record: .* cannot import"),
        ("a3c_data", {"env_id": functools.update_wrapper(lambda: None, Recorder)}, "is another object, or none"),
        ("task", {"attach_to": "tcp://127.0.0.1:5"}, "attach-to=tcp.*: a node that joins a task has no run of its own"),
        ("a3c_data", {"net": lambda: None}, "net=<lambda>: .* inside a function"),
        ("a3c_data", {"env_id": 5}, "env-id=5: must be a name, or a class or function"),
        ("a3c_data", {"env_kwargs": {"a": "x" * 200_000}}, "settings=a=x.*: too long for the command line"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused(chapter, settings, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(ConfigError, match=message):
        a3c_mp.train(chapter, **settings)


@pytest.mark.parametrize(("name", "is_ours"), [("train_a3c_data", True), ("play", True), ("my_train", False)])
def test_a_program_beside_the_chapters_is_none_of_the_projects_scripts(name, is_ours, monkeypatch):
    (main := types.ModuleType("__main__")).__file__ = str(ROOT / f"{name}.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert _bootstrap.is_script() == is_ours


def test_ctrl_c_belongs_to_a_program_that_trains_also_if_it_is_called_as_a_chapter():
    before = signal.signal(signal.SIGINT, _bootstrap.end_on_interrupt)
    try:
        with pytest.raises(ConfigError):
            a3c_mp.train("none")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_class_of_a_script_is_named_by_the_script(monkeypatch):
    (main := types.ModuleType("__main__")).__file__ = "/somewhere/my_script.py"
    main.Mine = in_a_cell()
    for name in ("__main__", "__mp_main__"):  # as in the processes of a pool
        monkeypatch.setitem(sys.modules, name, main)
        main.Mine.__module__ = name
        assert a3c_mp.api.training.id_of(main.Mine) == "my_script:Mine"


def test_a_script_that_a_run_imports_again_does_not_start_another_one(monkeypatch):
    monkeypatch.setenv(followed.VARIABLE, "some/folder")
    with pytest.raises(ConfigError, match='put the call below if __name__ == "__main__":'):
        a3c_mp.train("a3c_data")


def test_what_a_run_tells_is_read_once_in_order_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(followed.VARIABLE, str(tmp_path))
    for steps in range(3):
        assert followed.tell(steps=steps)
    assert list(followed.take_told(tmp_path)) == [{"steps": steps} for steps in range(3)]
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(followed.VARIABLE, str(tmp_path / "gone"))
    assert not followed.tell(steps=3), "which costs a run nothing"


def test_what_a_chapter_refuses_is_raised_and_not_printed(chapter, capfd):
    with pytest.raises(ConfigError, match=r"^lerning-rate=0.1: there is no such flag; perhaps you meant --learn") as no:
        a3c_mp.train("a3c_data", lerning_rate=0.1)
    assert (no.value.what, no.value.value, capfd.readouterr()) == ("lerning-rate", "0.1", ("", ""))


def test_an_id_that_is_registered_in_this_process_only_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    gymnasium.envs.registration.register("Cell-v0", in_a_cell())
    told = {"error": ["env-id", "Cell-v0", "Environment `Cell` doesn't exist", "see gymnasium.pprint_registry()"]}
    with pytest.raises(
        ConfigError, match=r"^env-id=Cell-v0: in the processes of the run, .*module:Cell-v0.*%%writefile"
    ):
        a3c_mp.api.training.result_of(2, told, "Cell-v0")


# ---- environments and policies


def make_count(length=5):
    return gymnasium.wrappers.TimeLimit(envs.CountEnv(), length)


@pytest.mark.parametrize(("env_id", "length"), [("envs:CountEnv", None), ("test_python:make_count?length=3", 3)])
def test_a_module_gives_an_environment_as_a_class_or_by_a_function(env_id, length):
    env = wrappers.make_env(env_id)
    assert isinstance(env.unwrapped, envs.CountEnv)
    assert (env.get_wrapper_attr("_max_episode_steps") if length else None) == length


def test_the_policy_of_a_net_with_state_remembers_each_environment(run_inline):
    done = run_inline.train(IMPALA, "--lstm", "--total-steps", "500")
    assert done.code == 0, done.err
    net, (space, _) = policy.load_net(policy.load_run(done.folder))
    space.seed(0)
    games = np.stack([[np.clip(space.sample(), -1, 1) for _ in range(6)] for _ in range(3)])  # [N, T, 4]
    state, expected = net.initial_state(3), []
    with torch.inference_mode():
        for obs in games.swapaxes(0, 1):
            logits, _, *state = net(torch.from_numpy(obs), *state)
            expected.append(logits.argmax(-1).numpy())
    several, one = a3c_mp.load_policy(done.folder), a3c_mp.load_policy(str(done.checkpoints[0]))
    assert np.array_equal([several(obs) for obs in games.swapaxes(0, 1)], expected)
    for number, game in enumerate(games):
        one.reset()
        assert [one(obs) for obs in game.tolist()] == [actions[number] for actions in expected]
        one.reset()
        with pytest.raises(ValueError, match="an action_mask"):
            one(game[0], mask=[True])
        view = np.ascontiguousarray(game[0, ::-1])[::-1]  # of negative strides
        assert one(view) == expected[0][number], "the episode begins here"
    assert one.make_env().action_space.contains(one(games[0, 0], starts=True))
    one.reset()
    assert one(games[0, 0], starts=False) == expected[0][0], "a new episode all the same"
    assert np.array_equal(several(games[:2, 0], starts=np.array([False, True])), expected[0][:2]), "another number"
    free = several(games[:2, 0], starts=True)
    assert np.array_equal(several(games[:2, 0], starts=True, mask=[None, None]), free)
    masked = several(games[:2, 0], starts=True, mask=[None, [free[1] == 1, free[1] == 0]])
    assert masked.tolist() == [free[0], 1 - free[1]]
    with pytest.raises(ValueError, match=re.escape("observations must be (4,) or [N, 4]")):
        one(games)
    played = one.evaluate(3, num_envs=2)
    assert [game.episode_return for game in played] == [game.length for game in played], "CartPole's reward"
    np.random.seed(3)  # noqa: NPY002
    assert sorted(played) == sorted(one.evaluate(3, num_envs=2)), "the same games"
    assert np.random.random() == np.random.RandomState(3).random(), "the program goes on with its own numbers"  # noqa: NPY002
    with pytest.raises(ValueError, match="0 episodes of 27000 steps in 8 environments"):
        one.evaluate(0)
    assert [game.length for game in one.evaluate(1, max_steps=4)] == [4]


# ---- the page and its example


@pytest.mark.slow
def test_the_examples_of_the_page_train_twice_in_a_thread_and_play(chapter, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "python.md").read_text().replace("total_steps=100_000", "total_steps=2_000")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module, *programs = sorted(blocks, key=lambda block: not block.startswith("# my_envs.py"))
    Path("my_envs.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    errors, found = [], {"__name__": "page"}

    def run():
        try:
            for program in programs:
                exec(program, found)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert found["result"].steps >= 2000
    assert found["callback"].returns


def test_the_cells_of_the_notebook_run(scripts):
    """In a fresh interpreter; magics that write files aside, they are Python."""
    cells = json.loads((ROOT / "examples" / "cartpole.ipynb").read_text())["cells"]
    (folder := scripts.runs_dir / "examples").mkdir()
    program = ["import matplotlib", "matplotlib.use('agg')"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        first, _, text = source.partition("\n")
        if first.startswith("%%writefile "):
            (folder / first.split()[1]).write_text(text)
        else:
            program.append(source.replace("total_steps=100_000", "total_steps=1_000, num_actors=1"))
    (folder / "cells.py").write_text("\n".join([f"import os; os.chdir({str(folder)!r})", *program]))
    done = scripts.finish(scripts.start(str(folder / "cells.py")), "")
    assert done.code == 0, done.err
    assert len(list((scripts.runs_dir / "runs").iterdir())) == 2
