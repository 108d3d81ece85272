"""The folder of a run: found writable at the start, and described in `config.json`."""

import errno
import json
import os
import re
import shutil
import stat
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import files_no_longer_than
from torch import nn

from a3c_mp.config import FORMAT, CommonArgs
from a3c_mp.errors import ConfigError, shown
from a3c_mp.processes import program
from a3c_mp.run import run_dir as folder
from a3c_mp.run.checkpoint import list_checkpoints
from a3c_mp.run.run import Run
from a3c_mp.run.run_dir import describe_run

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


@pytest.fixture
def args(tmp_path):
    return CommonArgs(env_id="CartPole-v1", runs_dir=tmp_path / "runs", run_name="r")


def a_run(args):
    net = nn.Linear(2, 2)
    return Run(args, "test", net, torch.optim.Adam(net.parameters()))


def ten_steps(run):
    with run:
        run.record_rollout(10, [], 0, 0)
    return run


def test_a_run_that_cannot_begin_leaves_no_folder_and_one_that_has_begun_does(args, capsys):
    for steps, is_first in ((0, True), (0, False), (10, True)):
        if not is_first:  # a driver has made it
            (args.runs_dir / "r").mkdir(parents=True)
        with suppress(ConfigError), a_run(args) as run:
            if steps:
                run.record_rollout(steps, [], 0, 0)
            raise ConfigError("node", "", "Ray cannot be started here")
        assert run.folder.exists() == (steps > 0)
        assert args.runs_dir.exists() == (steps > 0 or not is_first), "the user's own folder stays"
        assert ("the last checkpoint is" in capsys.readouterr().out) == (steps > 0)
        assert run.exit_code == 1


def test_the_current_folder_has_its_name(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded = describe_run(replace(args, resume=Path()), "test", Path(), 0)["args"]
    assert (recorded["run_name"], recorded["runs_dir"]) == (tmp_path.name, "..")


# ---- what cannot be written or read is one line, at the start


@pytest.mark.parametrize("room", [0, 1, 20, 100])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_disk_that_is_full_at_the_start_or_on_resume_is_bad_input(room, resumed, args, monkeypatch):
    """The first file that does not fit is the lock, `episodes.csv`, `config.json`; nothing that is there changes."""
    monkeypatch.setattr("os.getpid", lambda: 12345)
    run, before, line = None, {}, r"runs-dir=.* \(File too large\); choose another"
    if resumed:
        run, line = ten_steps(a_run(args)), r"resume=.* \(File too large\); make it writable"
        args = replace(args, resume=run.folder)
        before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.suffix in (".csv", ".json")}
    with files_no_longer_than(room), pytest.raises(ConfigError, match=line):
        a_run(args)
    assert all((run.folder / name).read_bytes() == content for name, content in before.items())
    if room <= 20:
        assert ten_steps(a_run(args)).exit_code == 0, "nothing of it stands in the way of the next start"


def test_runs_that_lead_nowhere_are_refused(args, tmp_path):
    args.runs_dir.symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(ConfigError, match=r"^runs-dir=.* cannot be written \(File exists\); choose another"):
        a_run(replace(args, run_name=None))


# ---- one command starts a run and goes on with it


def left_by_no_start(folder):
    pass


def left_before_its_description(folder):
    for name in (".lock", "run.log", "episodes.csv", "config.json.tmp", "checkpoints/.writable"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def left_before_a_checkpoint(folder):
    left_before_its_description(folder)
    (folder / "config.json").write_text("{")
    (folder / "events.out.tfevents.1").touch()
    for name in (
        "step_000000000010.pt",
        "step_000000000010.json.tmp",
        "best_000000000990.pt",
        "best_000000000990.json",
    ):
        (folder / "checkpoints" / name).touch()


@pytest.mark.parametrize("left", [left_by_no_start, left_before_its_description, left_before_a_checkpoint])
def test_a_run_starts_again_whatever_an_attempt_without_a_checkpoint_has_left(left, args):
    left(args.runs_dir / "r")
    run = ten_steps(a_run(replace(args, resume_or_start=True)))
    assert run.exit_code == 0
    assert (run.steps, len(json.loads((run.folder / "config.json").read_text())["starts"])) == (10, 1)
    assert len(list(run.folder.glob("events.*"))) == 1, "curves of one attempt"
    assert {path.name for path in run.checkpointer.folder.iterdir()} == {
        f"step_{10:012d}{end}" for end in (".pt", ".json")
    }


def test_a_start_that_is_refused_leaves_what_was_there(args):
    left_before_its_description(folder := args.runs_dir / "r")
    with suppress(ConfigError), a_run(replace(args, resume_or_start=True)):
        raise ConfigError("listen", "", "this port is in use")
    assert (folder / "episodes.csv").exists()


def test_without_the_flag_a_run_that_was_killed_at_its_start_is_refused_with_the_way_out(args):
    left_before_a_checkpoint(args.runs_dir / "r")
    with pytest.raises(
        ConfigError, match=r"holds a run already; .*; it has no checkpoint: --resume-or-start starts it"
    ):
        a_run(args)
    (args.runs_dir / "r/checkpoints/step_000000000010.pt").unlink()
    with pytest.raises(
        ConfigError, match=r"holds no checkpoint; .*--run-name r --resume-or-start starts this one again"
    ):
        a_run(replace(args, resume=args.runs_dir / "r"))


def test_a_checkpoint_that_another_start_has_written_meanwhile_is_not_replaced(args):
    ten_steps(a_run(args))
    with pytest.raises(ConfigError, match="holds a run already"):
        a_run(replace(args, resume_or_start=True))


def test_runs_without_a_name_that_start_in_the_same_second_have_folders_of_their_own(args, monkeypatch):
    monkeypatch.setattr(folder.time, "strftime", lambda form: "20300101-000000")
    names = [ten_steps(a_run(replace(args, run_name=None))).folder.name for _ in range(3)]
    assert names == [f"test-CartPole-v1-s1-20300101-000000{end}" for end in ("", "-2", "-3")]


def test_the_net_of_the_best_evaluation_is_written_once_there_is_space(args):
    run, net, told = ten_steps(a_run(args)), nn.Linear(2, 2), []
    run.checkpointer.log = SimpleNamespace(warning=told.append)
    with files_no_longer_than(64):
        run.checkpointer.save_best(net, 7)
    assert told[0].endswith("File too large (ulimit -f)")
    best = {name: value.clone() for name, value in net.state_dict().items()}
    nn.init.zeros_(net.weight)  # by the next evaluation's
    run.checkpointer.save()
    (path,) = run.checkpointer.folder.glob("best_*.pt")
    assert torch.load(path)["net"]["weight"].equal(best["weight"])


def test_the_net_of_an_evaluation_takes_the_place_of_what_training_called_the_best_meanwhile(args):
    run, net = ten_steps(a_run(args)), nn.Linear(2, 2)
    run.checkpointer.save_best(net, 50)
    run.checkpointer.save_best(net, 20)
    assert [path.name for path in list_checkpoints(run.checkpointer.folder, "best")] == ["best_000000000020.pt"]


@pytest.mark.parametrize("starts", [3, [3], [{}]])
def test_starts_that_were_edited_by_hand_are_begun_again(starts, args, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"starts": starts}))
    assert len(describe_run(args, "a3c_data", tmp_path, 5)["starts"]) == 1


@pytest.mark.parametrize("moment", range(4))
def test_the_loser_of_two_simultaneous_starts_says_that_the_run_is_in_use(moment, args):
    """Whatever the winner has made of its folder so far."""
    with folder.claim_folder(args, "test") as (winner, *_):
        for name in [".lock", "checkpoints/.writable", "config.json.tmp", "config.json"][1 : moment + 1]:
            (winner / name).touch()
        if moment == 0:
            (winner / ".lock").write_text("")
        with pytest.raises(ConfigError, match=r"run-name=r: .* is in use by .*process.*; wait for it, or choose"):
            a_run(replace(args, resume_or_start=True))


# ---- file systems


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(number, args, monkeypatch):
    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    run = ten_steps(a_run(args))
    assert run.exit_code == 0
    warning = f"WARNING {run.folder} cannot be locked ({os.strerror(number)}): see that no other run uses it"
    assert warning in (run.folder / "run.log").read_text()


@pytest.mark.parametrize(
    ("number", "is_refused"), [(errno.EINVAL, False), (errno.EOPNOTSUPP, False), (errno.EIO, True)]
)
def test_a_folder_that_cannot_be_synced_is_written_all_the_same(number, is_refused, args, monkeypatch):
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    if is_refused:
        with pytest.raises(ConfigError, match="cannot be written"):
            a_run(args)
    else:
        assert ten_steps(a_run(args)).exit_code == 0
        assert not list(args.runs_dir.rglob("*.tmp"))


# ---- the last state


def test_a_run_whose_last_state_is_not_saved_has_failed_and_names_the_last_checkpoint(args, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_x.py"])
    monkeypatch.setattr("sys.orig_argv", ["python", "train_x.py"])
    with a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        run.save()
        run.record_rollout(10, [], 0, 0)
        run.exit_reason = "total_steps"
        with torch.no_grad():
            run.net.bias.fill_(torch.nan)
    assert run.exit_code == 1
    log = (run.folder / "run.log").read_text()
    assert "ERROR error: the state at 20 steps was not saved" in log
    assert "bias holds NaN or infinity" in log
    newest = run.checkpointer.folder / f"step_{10:012d}.pt"
    assert f"the last checkpoint is {newest}; continue with python train_x.py --resume {run.folder}\n" in log


def test_a_run_whose_folder_is_deleted_and_taken_by_another_leaves_that_as_it_is(args, capsys):
    named = replace(args, run_name="r")
    with a_run(named) as run:
        run.record_rollout(10, [], 0, 0)
        shutil.rmtree(run.folder)
        with a_run(named) as other:
            other.record_rollout(5, [], 0, 0)
            run.save()
        run.record_rollout(10, [], 0, 0)
    assert run.exit_code == 1
    assert [path.name for path in other.checkpointer.folder.glob("step_*.pt")] == [f"step_{5:012d}.pt"]
    assert json.loads((other.folder / "summary.json").read_text())["steps"] == 5
    assert f"not written to {other.checkpointer.folder}: {other.folder} belongs to another run now" in (
        capsys.readouterr().out
    )


def test_a_run_folder_that_is_moved_is_named(args, capsys):
    with a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        moved = run.folder.rename(run.folder.with_name("moved"))
        run.save()
        moved.rename(run.folder)
    assert run.exit_code == 0
    assert f"the run folder {run.folder} is {moved} now: move it back" in capsys.readouterr().out


def test_checkpoints_that_cannot_be_reached_are_not_started_over(args, tmp_path):
    with a_run(named := replace(args, run_name="r")) as run:
        run.record_rollout(10, [], 0, 0)
    (elsewhere := run.checkpointer.folder).rename(tmp_path / "elsewhere")
    elsewhere.symlink_to(tmp_path / "not there")
    before = sorted(path.name for path in run.folder.iterdir())
    with (
        pytest.raises(ConfigError, match=r"checkpoints cannot be written"),
        a_run(replace(named, resume_or_start=True)),
    ):
        pass
    assert sorted(path.name for path in run.folder.iterdir()) == before


def test_a_run_folder_that_is_deleted_is_missed_and_not_made_again(args, capsys):
    with a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        shutil.rmtree(run.folder)
        run.save()
        run.record_rollout(10, [], 0, 0)
    assert not run.folder.exists()
    assert run.exit_code == 1
    shown = capsys.readouterr().out
    assert f"at 10 steps not written to {run.checkpointer.folder}: the run folder {run.folder} was deleted" in shown
    assert "the state at 20 steps was not saved" in shown
    assert "the last checkpoint is" not in shown, "it does not exist"


@pytest.mark.parametrize("name", [".lock", "config.json"])
def test_a_run_folder_without_settings_is_no_place_for_checkpoints(args, capsys, name):
    with a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        run.save()
        (run.folder / name).unlink()
        run.record_rollout(10, [], 0, 0)
    shown = capsys.readouterr().out
    assert (run.exit_code, "cannot be resumed" in shown) == ((1, True) if name == "config.json" else (0, False))
    assert "continue with" not in shown


# ---- config.json


def test_every_start_is_kept_and_the_format_named(args, monkeypatch):
    run = ten_steps(a_run(args))
    first = json.loads((run.folder / "config.json").read_text())
    monkeypatch.setattr("sys.argv", ["train.py", "--resume", "r", "--num-envs", "7"])
    monkeypatch.setattr(folder, "git_commit", lambda: "c0ffee")
    ten_steps(a_run(replace(args, resume=run.folder, num_envs=7)))
    second = json.loads((run.folder / "config.json").read_text())
    assert first["format"] == second["format"] == FORMAT
    assert [start["args"]["num_envs"] for start in second["starts"]] == [args.num_envs, 7]
    assert second["starts"][0] == first["starts"][0], "a resume adds to it, nothing is overwritten"
    for start, config in ((first["starts"][0], first), (second["starts"][1], second)):
        assert set(start) == {"time", "steps", "commit", "command", "versions", "machine", "args"}
        assert all(config[name] == start[name] for name in ("commit", "command", "versions", "machine", "args"))
    assert (second["commit"], second["command"][-1]) == ("c0ffee", "7"), "above the list stands the newest"
    assert [start["steps"] for start in second["starts"]] == [0, 10]
    assert first["starts"][0]["time"] <= second["starts"][1]["time"]


def test_the_commit_is_that_of_the_source_tree_not_of_a_repository_that_it_is_installed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "__file__", str(tmp_path / "program.py"))
    find_commit = program.git_commit.__wrapped__  # without its memory
    for name in ("program.py", "theirs.py"):
        (tmp_path / name).touch()
    for command in (["init", "-q"], ["add", "theirs.py"], [*IDENTITY, "commit", "-qm", "theirs"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert find_commit() is None
    for command in (["add", "program.py"], [*IDENTITY, "commit", "-qm", "the source"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert re.fullmatch("[0-9a-f]{40}", find_commit())


# ---- how paths are shown


@pytest.mark.parametrize(
    ("start", "text", "wanted"),
    [
        ("/a/b", "in /a/b/runs/r: '/a/b/x', /c/a/b/x, /a/bc, /a/b", "in runs/r: 'x', /c/a/b/x, /a/bc, /a/b"),
        ("/", "attach-to=tcp://127.0.0.1:5: /runs/r", "attach-to=tcp://127.0.0.1:5: /runs/r"),
    ],
)
def test_paths_below_the_folder_of_the_start_are_shown_relative_to_it(start, text, wanted, monkeypatch):
    monkeypatch.setattr("a3c_mp.errors.STARTED_IN", [Path(start)])
    assert shown(text) == wanted
