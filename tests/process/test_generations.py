"""A population in processes: ranks, kills and resumes leave its generations as they are, to the last bit."""

import json
import random
import sys
import time

import psutil
import pytest
from harness import POPULATION, family_of, still_alive
from nodes import free_port

SLOW = pytest.mark.slow
MUTATED = ("--mutate-none", "0")


def launcher(ranks, port=0, *flags):
    """The command that starts so many ranks; none for one."""
    if ranks == 1:
        return ()
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--no_python")
    return (*accelerate, "--main_process_port", str(port), "--num_processes", str(ranks), *flags)


def lineage_of(done):
    """Its `lineage.csv`, in which each member has a SHA-256."""
    return (done.folder / "lineage.csv").read_text()


@pytest.fixture
def train(scripts, monkeypatch, tmp_path):
    """Starts a quick run by a launcher of ranks; its name is their number."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no settings of the user's

    def train(ranks, *flags, **popen):
        return scripts.train(POPULATION, *MUTATED, *flags, name=str(ranks), prefix=launcher(ranks), **popen)

    return train


@pytest.mark.timeout(600)
@SLOW  # two of them: see below
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_have_the_generations_of_one(train, scripts, run_inline, ranks):
    flags = ["--population", str(ranks), "--total-steps", str(ranks * 600)]
    several = scripts.finish(train(ranks, *flags), str(ranks), timeout=300)
    one = run_inline.train(POPULATION, *MUTATED, *flags)
    assert several.code == 0, several.err
    assert lineage_of(several) == lineage_of(one)
    assert several.summary["weights_sha256"] == one.summary["weights_sha256"]
    assert several.out.count("--total-steps reached after") == 1, "one of them prints"


@pytest.fixture
def on_two_machines(train, scripts, cable, tmp_path):
    """Starts a quick run with a rank here and one behind a cable, each with flags of its own."""
    cable("-n a3c-test link set lo up")
    (tmp_path / "other").mkdir()
    other = ("ip", "netns", "exec", "a3c-test", "env", "-C", str(tmp_path / "other"))

    def start(flags, other_flags):
        port, machines = free_port(), ("--num_machines", "2", "--main_process_ip", "10.231.7.1", "--machine_rank")
        return [
            scripts.start(POPULATION.script, *own, prefix=(*prefix, *launcher(2, port, *machines, str(number))))
            for number, (prefix, own) in enumerate([((), flags), (other, other_flags)])
        ]

    return start


@pytest.mark.timeout(600)
@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=SLOW)])
def test_ranks_on_two_machines_have_the_generations_of_one_process(
    on_two_machines, scripts, run_inline, tmp_path, starts
):
    """The second start resumes the run, whose folder the other machine does not have."""
    own = ["--run-name", "two", *POPULATION.flags, *MUTATED]
    for start in range(starts):
        total = ("--total-steps", str(800 * (start + 1)))
        here, other = on_two_machines([*own, *total], [*POPULATION.flags, *MUTATED, *total])
        done = scripts.finish(here, "two", timeout=300)
        out, err = other.communicate(timeout=60)
        assert (done.code, other.returncode) == (0, 0), done.err + err
        assert done.out.count("--total-steps reached after") == 1
        assert (out, list((tmp_path / "other").iterdir())) == ("", []), "nothing is printed or written there"
        own = ["--resume", "runs/two"]
    one = run_inline.train(POPULATION, *MUTATED, *total)
    assert lineage_of(done) == lineage_of(one)
    assert done.summary["weights_sha256"] == one.summary["weights_sha256"]


@SLOW  # of one machine: see below
@pytest.mark.parametrize(("lost", "seconds"), [("rank 1", 10), ("rank 0", 10), ("link", 20)])
def test_what_is_lost_on_one_machine_ends_all_in_the_middle_of_a_generation(
    on_two_machines, scripts, cable, lost, seconds
):
    endless = [*POPULATION.flags, "--generation-steps", "200_000", "--total-steps", "1e8"]
    before, launchers = scripts.files(), on_two_machines([*endless, "--run-name", "a"], endless)
    scripts.wait_for("a", "config.json:{", launchers[0])
    scripts.wait_until(lambda: all(map(members_of, launchers)), launchers[0])
    family = [child for each in launchers for child in (*ranks_of(each), *members_of(each))]
    begin = time.monotonic()
    if lost == "link":
        cable("link set a3c-hub down")
    else:
        ranks_of(launchers[int(lost[-1])])[0].kill()
    printed = ["".join(each.communicate(timeout=60)) for each in launchers]
    psutil.wait_procs(family, timeout=10)
    assert time.monotonic() - begin < seconds
    assert not still_alive(family)
    assert launchers[0].returncode != 0
    lines = [text.count("\nerror: another rank has ended or its machine does not answer\n") for text in printed]
    assert lines == {"rank 0": [0, 1], "rank 1": [1, 0], "link": [1, 1]}[lost], printed
    assert not scripts.left(before)


def members_of(process):
    """The processes of members, of all ranks that a launcher has started."""
    return [member for rank in ranks_of(process) for member in family_of(rank.pid)]


def ranks_of(process):
    """The processes of the ranks, in order."""
    found = [child for child in psutil.Process(process.pid).children(recursive=True) if "RANK" in child.environ()]
    parents = [child for child in found if "train_population.py" in " ".join(child.cmdline())]
    return sorted(parents, key=lambda child: int(child.environ()["RANK"]))


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_ends_all_and_the_last_generation_goes_on(train, scripts, run_inline):
    before = scripts.files()
    process = train(2, "--total-steps", "1e7", "--checkpoint-steps", "400")
    scripts.wait_for("2", "lineage.csv:\n2,1,", process)  # the third generation has ended
    ranks = ranks_of(process)
    everything = [*ranks, *(child for rank in ranks for child in family_of(rank.pid))]
    assert len(everything) == 2 + 2
    ranks[1].kill()
    killed = time.monotonic()
    process.communicate(timeout=60)
    psutil.wait_procs(everything, timeout=10)
    assert not still_alive(everything)
    assert time.monotonic() - killed < 10
    assert process.returncode != 0
    assert not scripts.left(before)
    done = run_inline(POPULATION.script, "--resume", "runs/2", "--total-steps", "1", name="2")
    assert done.code == 0, done.log
    assert done.summary["steps"] >= 800, "at most the generation that had just ended is lost"


@SLOW
@pytest.mark.timeout(300)
def test_a_signal_ends_a_rank_that_waits_for_another_one(train, scripts):
    process = train(2, "--total-steps", "1e7")
    scripts.wait_for("2", "lineage.csv:\n0,1,", process)
    first, second = ranks_of(process)
    second.suspend()
    try:
        time.sleep(1.5)  # rank 0 has played a generation, and waits for the results of the other's
        first.terminate()
        assert first.wait(timeout=10) is None
    finally:
        second.kill()  # else the launcher does, after half a minute
    process.communicate(timeout=60)
    summary = json.loads((scripts.runs_dir / "runs/2/summary.json").read_text())
    assert summary["exit_reason"] == "SIGTERM"


@SLOW
@pytest.mark.timeout(3600)
def test_members_that_are_killed_at_any_moment_leave_every_generation_as_it_is(scripts, run_inline):
    flags = [*MUTATED, "--total-steps", "20000"]
    whole = run_inline.train(POPULATION, *flags)
    rng, instants = random.Random(0), 20
    trainer = scripts.train(POPULATION, *flags, "--max-restarts", "99", name="killed")
    for kill in range(instants):
        scripts.wait_until(lambda: (scripts.runs_dir / "runs/killed/lineage.csv").exists(), trainer)
        time.sleep(rng.uniform(0, 0.5))  # a generation or two
        members = family_of(trainer.pid)
        members[kill % len(members)].kill()
        text = f"run.log:restart {kill + 1} of 99"
        scripts.wait_for("killed", text, trainer)
    done = scripts.finish(trainer, "killed", timeout=600)
    assert done.code == 0, done.out + done.err
    assert done.summary["worker_restarts"] == instants
    assert lineage_of(done) == lineage_of(whole)
    assert done.summary["weights_sha256"] == whole.summary["weights_sha256"]


@SLOW
@pytest.mark.timeout(3600)
def test_a_run_whose_ranks_are_killed_at_any_moment_goes_on_with_any_number_of_them(scripts, run_inline, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(scripts.temporary))
    rng, flags, generation = random.Random(0), ["--run-name", "killed", *POPULATION.flags, *MUTATED], 0
    lineage = scripts.runs_dir / "runs/killed/lineage.csv"
    for kill in range(20):
        before, num_ranks = scripts.files(), (2, 2, 1)[kill % 3]
        process = scripts.start(
            POPULATION.script, *flags, "--total-steps", "1e7", "--checkpoint-steps", "400", prefix=launcher(num_ranks)
        )
        at_start = kill % 4 == 3  # before they meet, or then; else after at least one generation
        if not at_start:
            scripts.wait_for("killed", f"lineage.csv:\n{generation},", process)
        time.sleep(rng.uniform(0, 8 if at_start else 1))
        victims = ranks_of(process) if num_ranks > 1 else [process]
        family = [child for each in (process, *victims) for child in psutil.Process(each.pid).children(recursive=True)]
        rng.choice(victims or [process]).kill()
        killed = time.monotonic()
        process.communicate(timeout=60)
        psutil.wait_procs(family, timeout=10)
        assert time.monotonic() - killed < 10
        assert not still_alive(family)
        assert not scripts.left(before)
        generation = int(lineage.read_text().splitlines()[-1].split(",")[0]) + 1
        flags = ["--resume", "runs/killed"]
    total = ["--total-steps", str(400 * (generation + 2))]
    done = scripts.finish(scripts.start(POPULATION.script, *flags, *total), "killed")
    assert done.code == 0, done.err
    whole = run_inline.train(POPULATION, *MUTATED, *total, name="whole")
    assert lineage_of(done) == lineage_of(whole)
    assert done.summary["weights_sha256"] == whole.summary["weights_sha256"]
