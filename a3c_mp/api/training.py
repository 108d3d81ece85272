"""`a3c_mp.train`: train by a chapter from a program, a notebook or a thread.

The chapter runs as a child process with the command line that a user would type, so settings, checks, signals,
checkpoints and results are the same. What starts it keeps its own signal handlers, threads and environment variables.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gymnasium.envs import registration

from a3c_mp._bootstrap import CHAPTERS, PARENT_VARIABLE, end_on_interrupt
from a3c_mp.api.policy import TrainedPolicy, load_policy
from a3c_mp.cli.flags import as_flag
from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.run.followed import VARIABLE, take_told
from a3c_mp.run.preflight import find_temporary_folder

POLL_SECONDS = 0.1  # time between two looks at what the run tells
END_SECONDS = 120.0
"""longest wait for a run that is asked to end: it writes a checkpoint and closes its environments; then it is killed"""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    solved: bool
    steps: int  # agent steps
    mean_return: float | None  # raw, of the last 100 games of training; None before the first one
    exit_reason: str  # "solved", "total_steps", "max_seconds", "callback", or the signal that ended it
    summary: dict[str, Any] = field(repr=False)  # all of `summary.json`

    def policy(self, **options: Any) -> TrainedPolicy:
        """The policy of the best checkpoint; options as those of `load_policy`."""
        return load_policy(self.folder, **options)


class Callback:
    """Hooks of a run; override any. They are called in the thread that trains, and the run does not wait for them.

    If one returns False the run ends as by SIGTERM, with a checkpoint. So it does if one raises, and `train` raises it.
    """

    def on_update(self, steps: int, metrics: Mapping[str, float]) -> bool | None:
        """After updates, about once a second: agent steps, and what TensorBoard gets, means since the last time."""
        return None

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> bool | None:
        """After an evaluation (`eval_every`): agent steps of the weights that played, and `eval/return_mean` etc."""
        return None

    def on_end(self, result: Result) -> None:
        """When the run has ended without an error, before `train` returns."""


def train(
    chapter: str | Path, *, env_id: Any = None, callbacks: Callback | Sequence[Callback] = (), quiet: bool = False,
    **settings: Any,
) -> Result:  # fmt: skip
    """Train, and wait for the end of the run.

    Args:
        chapter: `a3c_data`, `impala`, ...: train_a3c_data.py etc.; or the path of a chapter of one's own (.py).
        env_id: an id; or a class, or a function that makes an environment, at the top level of a module.
        callbacks: one, or several, whose hooks are called in this order.
        quiet: print only what the run writes to stderr; its log is in run.log in the run folder.
        settings: as the flags of the chapter, with `_` for `-`; `env_kwargs` may be a dict, `net` and `wrapper` a
            function or class at the top level of a module.

    Raises:
        ConfigError: what the chapter refuses, in the same words.
        TrainingError: the run failed.
    """
    if VARIABLE in os.environ:
        why = "a process of a run imports the script that started it, and this call with it"
        raise ConfigError("train", "", why, 'put the call below if __name__ == "__main__":')
    if signal.getsignal(signal.SIGINT) is end_on_interrupt:  # the program is a train_*.py beside the chapters
        with suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)
    hooks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    script = find_script(chapter)
    if settings.get("attach_to") is not None:
        why = "a node that joins a task has no run of its own, and this call no result"
        raise ConfigError("attach-to", settings["attach_to"], why, "start train_task.py with it")
    given: dict[str, Any] = {"env_id": id_of(env_id)} if env_id is not None else {}
    for name in {"net", "wrapper"} & settings.keys():
        is_list = isinstance(value := settings[name], list | tuple)
        given[name] = [id_of(each, name) for each in value] if is_list else id_of(value, name)
    words = [word for name, value in (settings | given).items() for word in as_flag(name, value)]
    find_temporary_folder()
    told: dict[str, Any] = {}
    is_stopped = False
    with following([sys.executable, str(script), *words], quiet) as (process, folder):
        while process.returncode is None and not is_stopped:  # the end of this block ends the run
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            for facts in take_told(folder):  # also what it has told at its end
                told |= facts
                if "metrics" in facts and not call_hooks(hooks, facts["steps"], facts["metrics"]):
                    is_stopped = True
                    break
    result = result_of(process.returncode, told, given.get("env_id", ""))
    if is_stopped and result.exit_reason == "SIGTERM":
        result = replace(result, exit_reason="callback")
    for hook in hooks:
        hook.on_end(result)
    return result


def find_script(chapter: str | Path) -> Path:
    """The script of a chapter. Raises ConfigError if there is none."""
    names = sorted(path.stem for path in CHAPTERS.glob("train_*.py"))
    if (name := f"train_{str(chapter).removeprefix('train_')}") in names:
        return CHAPTERS / f"{name}.py"
    if Path(chapter).suffix == ".py" and Path(chapter).is_file():
        return Path(chapter)
    known = ", ".join(name.removeprefix("train_") for name in names)
    raise ConfigError("chapter", chapter, f"must be one of {known}, or a script (.py)")


def id_of(target: Any, flag: str = "env-id") -> str:
    """An id, as it is; `module:Name` of a class or function. Raises ConfigError if a run cannot import it."""
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not callable(target) or not name:
        raise ConfigError(flag, target, "must be a name, or a class or function at the top level of a module")
    if module in ("__main__", "__mp_main__"):  # the latter: in a pool's process, which the script started
        file = getattr(sys.modules["__main__"], "__file__", None) or ""
        spec = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m package.module`; pdb removes it
        module = spec.name if spec is not None else Path(file).stem if file.endswith(".py") else None
    there = getattr(sys.modules.get(target.__module__), name, None)
    if module is None or not name.isidentifier():
        why = "the processes of a run cannot import what is defined in a notebook's cell or inside a function"
        fix = f"write it into a module (a cell that begins with %%writefile my_envs.py) and use my_envs.{name}"
        raise ConfigError(flag, name, why, fix)
    is_derived = isinstance(target, type) and isinstance(there, type) and issubclass(target, there)
    is_of_a_reload = type(there) is type(target) and not hasattr(target, "__wrapped__") and not is_derived
    if there is not target and not is_of_a_reload:  # it wraps what its name is of, or a profiler runs this script
        fix = "write a class or a function at the top level of a module"
        raise ConfigError(flag, name, f"{target.__module__}.{name} is another object, or none", fix)
    return f"{module}:{name}"


def call_hooks(hooks: Sequence[Callback], steps: int, metrics: Mapping[str, float]) -> bool:
    """Call the hook that a point of the curves is for, of all callbacks. Returns whether the run goes on."""
    is_evaluation = "eval/return_mean" in metrics
    if not is_evaluation and all(name.startswith("eval/") for name in metrics):
        return True  # a confirmation, which belongs to the evaluation before it
    calls = [hook.on_evaluation if is_evaluation else hook.on_update for hook in hooks]
    answers = [call(steps, metrics) for call in calls]  # all are called, also after one that ends the run
    return all(answer is None or answer for answer in answers)  # also numpy's False ends it


@contextmanager
def following(command: Sequence[str], quiet: bool = False) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start a run, which ends with this block or the thread that it is in; yields its process and what it tells in."""
    with tempfile.TemporaryDirectory(prefix="a3c-") as folder:
        parent = f"{os.getpid()} {int(signal.SIGTERM)}"  # which ends a run with a checkpoint
        found = os.pathsep.join(os.path.abspath(place) for place in sys.path)  # modules that are imported here
        env = {**os.environ, VARIABLE: folder, PARENT_VARIABLE: parent, "PYTHONPATH": found}
        try:
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL if quiet else None)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            why, fix = "too long for the command line of the run", "write it to a file that the environment reads"
            raise ConfigError("settings", f"{max(command, key=len).strip()[:40]}...", why, fix) from error
        try:
            yield process, Path(folder)
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            finally:  # the time is over, or there was another Ctrl-C
                process.kill()
                process.wait()


def result_of(code: int, told: Mapping[str, Any], env_id: str) -> Result:
    """The result of a run that has ended. Raises as `train` does."""
    if "error" in told:
        what, value, why, fix = told["error"]
        if what == "env-id" and value == env_id and env_id.partition("?")[0] in registration.registry:
            why = f"in the processes of the run, {why[:1].lower()}{why[1:]}"
            fix = f"name the module that registers it (module:{env_id}); what a notebook's cell registers, write into "
            fix += "one (a cell that begins with %%writefile my_envs.py)"
        raise ConfigError(what, value, why, fix)
    folder = Path(told.get("folder", ""))
    summary: dict[str, Any] = {}
    with suppress(OSError):
        summary = json.loads((folder / "summary.json").read_text()) if "folder" in told else {}
    if not summary or code == 1 or code < 0:
        end = summary.get("exit_reason") or f"it ended with code {code}"
        end = f"it was killed by {signal.Signals(-code).name}" if code < 0 else end  # its summary may be an older one
        if code == 1 and summary and not end.startswith("error"):
            end = f"{end}, but its last state was not saved"
        raise TrainingError(f"{end}; see {folder / 'run.log'}" if told else f"{end} before it began, see its output")
    return Result(
        folder, summary["solved"], summary["steps"], summary["mean_return_100"], summary["exit_reason"], summary
    )
