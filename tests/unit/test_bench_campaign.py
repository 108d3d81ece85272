"""The campaign: rows that go on another day, on one kind of machine and by one code, and older files that leave."""

import json
from types import SimpleNamespace

import psutil
import pytest

from a3c_mp.errors import ConfigError
from bench import campaign, common, records, solve

ROWS = [campaign.solved(chapter, campaign.CARTPOLE, 2, 30) for chapter in ("a3c_data", "task")]


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Run the campaign, whose runs are instant and take an hour; `seen` are their commands, `world` is what it sees."""
    world = SimpleNamespace(seen=[], hour=0.0, busy=[], commit="c0ffee", machine="A", code="c0ffee", folder=tmp_path)
    world.uncommitted = set()

    def train(command, args, name, steps):
        world.seen.append(f"{command[0]} {command[-1]}")
        world.hour += 1
        if world.commit == "broken":
            raise SystemExit(3)
        return tmp_path

    monkeypatch.setattr(campaign, "ROWS", ROWS)
    for module in campaign, records:
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "before_run", records.before_run)  # put back afterwards
    monkeypatch.setattr(records, "machine", lambda: {"name": world.machine, "cores": 2})
    monkeypatch.setattr(records, "commit_of", lambda: world.commit)
    monkeypatch.setattr(records, "code_differs", lambda commit: commit != world.code)
    monkeypatch.setattr(campaign, "is_committed", lambda path: path.name not in world.uncommitted)
    monkeypatch.setattr(common, "train", train)
    monkeypatch.setattr(solve, "table", lambda result: "")
    figures = {"exit_reason": "solved", "solved": True, "wall_seconds": 3600.0}
    monkeypatch.setattr(solve, "outcome", lambda folder, steps: figures)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: world.busy.pop() if world.busy else 0.5)
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: 3600 * world.hour))

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["campaign.py", *flags])
        return campaign.main()

    run.world = world
    return run


def files(world):
    return [json.loads(path.read_text()) for path in sorted(world.folder.glob("*.json"))]


def test_a_campaign_goes_on_where_it_ended(go, capsys):
    world = go.world
    world.busy = [1.0, 80.0, 90.0]
    assert go("--hours=0.5") == 0
    assert world.seen == ["train_a3c_data.py --seed=1"], "no run starts after its time"
    (found,) = files(world)
    assert found["runs"][0]["others_percent"] == 1.0, "it has waited for the others"
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("waiting: other processes use 90% of the processors") == 1
    assert "1 of 2 | 1.0 |" in printed, "an hour, as its first run took"
    assert "| all | | 2.0 |" in printed
    assert go("--list") == 0
    assert go("--rows", "cartpole-a") == 0
    assert go() == 0
    assert world.seen[1:] == [
        f"train_{name} --seed={s}" for name, s in (("a3c_data.py", 2), ("task.py", 1), ("task.py", 2))
    ]
    assert [len(each["runs"]) for each in files(world)] == [2, 2]


def test_a_campaign_is_of_one_code_and_one_kind_of_machine(go, capsys):
    world = go.world
    go("--hours=0.5")
    world.machine = "B"
    with pytest.raises(
        ConfigError, match=r"^rows=cartpole-a3c_data: it has runs of A, and rows of chapters are compared"
    ):
        go("--rows", "cartpole-task")
    world.machine = "A"
    world.commit = world.code = "facade"
    go("--list")
    assert "runs of other code or versions: c0ffee" in capsys.readouterr().out
    go("--rows", "cartpole-a3c_data", "--commits", "c0f")
    assert [run["commit"] for run in files(world)[0]["runs"]] == ["c0ffee", "facade"]
    world.commit = "facade+"
    with pytest.raises(ConfigError, match=r"^commits: the code differs from its commit"):
        go()


def test_a_row_that_fails_does_not_end_the_campaign(go, capsys):
    go.world.commit = "broken"
    assert go() == 1
    assert len(go.world.seen) == 2
    assert "cartpole-task failed: 3" in capsys.readouterr().out


def test_older_files_leave_when_a_row_is_whole(go):
    world, old = go.world, go.world.folder / "solve_old.json"
    go("--hours=0.5")
    changes = {"date": "2020-01-01 00:00:00", "machine": {"name": "Z"}, "settings": {"default": {"seed": 7}}}
    old.write_text(json.dumps(files(world)[0] | changes))
    other = world.folder / "solve_other.json"
    other.write_text(json.dumps(files(world)[0] | changes | {"env_id": "Pendulum-v1"}))
    go("--list", "--prune")
    assert old.exists(), "the row lacks a run"
    world.uncommitted = {old.name}
    go("--prune")
    assert old.exists(), "nobody else has it"
    world.uncommitted = set()
    go("--prune")
    assert not old.exists()
    assert other.exists()


def test_the_rows_are_those_of_the_results_and_differ():
    names = [row.name for row in campaign.ROWS]
    assert len(set(names)) == len(names)
    shown = {(flags[0], flags[1]) for flags in (row.flags.split() for row in campaign.ROWS if row.bench is solve)}
    for path in (common.ROOT / "bench" / "results").glob("solve_*.json"):
        result = json.loads(path.read_text())
        if result["settings"]["default"]["stop_return"] is not None:
            assert (f"--chapter={result['chapter']}", f"--env-id={result['env_id']}") in shown
