"""Chapter 7 on real Ray: the same weights as chapter 4, faults, clusters of two nodes, and nothing left behind.

A run starts Ray in a folder of its own below /tmp; a cluster's token and note are in a folder of the test.
"""

import os
import signal
import time
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from harness import IMPALA, RAY_DQN, RAY_IMPALA, row_id, still_alive
from nodes import free_port
from virtual_gpu import library

from a3c_mp.cluster.node import FOLDER_PREFIX, ClusterAddress, Node, environment

SLOW = pytest.mark.slow
DETERMINISTIC = ["--deterministic", "--total-steps", "1500"]
LONG = ["--total-steps", "1e8"]
TWO_LEARNERS = ["--num-learners", "2", "--replay-proportion", "0", "--batch-unrolls", "2"]
pytestmark = pytest.mark.timeout(600)


def command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ray_of(pid, word):
    """Descendants of a process whose command line has a word, such as ray::RayWorker."""
    return [child for child in psutil.Process(pid).children(recursive=True) if word in command(child)]


def open_to(processes):
    """Addresses at which processes listen."""
    found = {at.laddr.ip for p in processes for at in p.net_connections() if at.status == psutil.CONN_LISTEN}
    return {ip.removeprefix("::ffff:") for ip in found}


def processes_of_ray(scripts):
    """Every process that has to do with the folder of a node of this test."""
    folder = str(scripts.temporary)
    found = {process for process in psutil.process_iter() if folder in command(process)}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"{folder}/a3c"):
                found.add(psutil.Process(int(link.parts[2])))
        except (OSError, psutil.Error):
            pass
    return found


@pytest.fixture(autouse=True)
def nothing_of_ray_is_left(scripts):
    yield
    for process in reversed(scripts.started):
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while (left := [*processes_of_ray(scripts), *folders(scripts)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert not list(Path("/dev/shm").glob("*plasma*"))


def folders(scripts):
    return list(scripts.temporary.glob(f"{FOLDER_PREFIX}*"))


def start_learning(scripts, chapter, *flags):
    """Start a run, and wait until its last actor has finished a game."""
    trainer = scripts.train(chapter, *flags)
    scripts.wait_for_game(trainer)
    return trainer


def end(scripts, trainer, signum=signal.SIGTERM):
    trainer.send_signal(signum)
    return scripts.finish(trainer, "r", timeout=30)


# ---- one machine


def test_on_ray_chapter_4_has_the_same_weights_to_the_last_bit(scripts, run_inline):
    """Also: everything listens on the loopback interface, and the token is in no command line."""
    trainer = scripts.train(RAY_IMPALA, *DETERMINISTIC)
    scripts.wait_until(lambda: ray_of(trainer.pid, "ray::RayWorker"), trainer, timeout=300)  # beside other tests
    family = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children(recursive=True)]
    token = ray_of(trainer.pid, "gcs_server")[0].environ()["RAY_AUTH_TOKEN"]
    assert open_to(family) == {"127.0.0.1"}
    assert not [p for p in family if token in command(p)]
    assert [path.stat().st_mode & 0o777 for path in folders(scripts)] == [0o700], "others do not reach what is in it"
    on_ray = scripts.finish(trainer, "r")
    assert on_ray.code == 0, on_ray.err
    assert "(raylet)" not in on_ray.out + on_ray.err
    assert "Ray cluster: 1 node, 2 CPUs; 2 actors wanted" in on_ray.out
    alone = run_inline.train(IMPALA, *DETERMINISTIC, name="alone", workers=None)
    assert on_ray.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert run_inline("play.py", "runs/r", "--episodes", "2").code == 0


@SLOW
def test_a_deterministic_run_is_resumed_and_rebuilt_to_the_last_bit(scripts):
    flags = ["--deterministic", "--total-steps", "20000"]
    whole = scripts.run(RAY_IMPALA, *flags, name="whole")
    trainer = start_learning(scripts, RAY_IMPALA, *flags)
    ray_of(trainer.pid, "ray::RayWorker")[0].kill()
    scripts.wait_for("r", "run.log:rebuilt to where it was", trainer)
    stopped = end(scripts, trainer)
    assert stopped.code == 143
    assert 0 < stopped.summary["steps"] < 20000
    resumed = scripts.resume(RAY_IMPALA)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.summary["worker_restarts"] == 1


@SLOW
@pytest.mark.parametrize("chapter", [RAY_IMPALA, RAY_DQN], ids=row_id)
def test_actors_that_are_killed_or_stopped_are_replaced(scripts, chapter):
    trainer = start_learning(scripts, chapter, *LONG, "--hang-seconds", "5")
    killed, stopped = ray_of(trainer.pid, "ray::RayWorker")
    killed.kill()
    scripts.wait_for("r", "run.log:died; restart 1 of 5", trainer, timeout=5)
    stopped.suspend()
    scripts.wait_for("r", "run.log:sent no heartbeat for 5 s and was killed", trainer, timeout=20)
    scripts.wait_until(lambda: len(ray_of(trainer.pid, "ray::RayWorker")) == 2, trainer, timeout=60)
    done = end(scripts, trainer, signal.SIGINT)
    assert done.code == 130
    assert done.summary["worker_restarts"] == 2
    assert len((done.out + done.err).splitlines()) < 30


@SLOW
@pytest.mark.parametrize(
    ("chapter", "actor", "line"),
    [
        (RAY_IMPALA, "ray::ParameterServer", "the parameter server died; another one is started"),
        (RAY_DQN, "ray::ReplayShard", "transitions are lost, an empty one is started"),
    ],
    ids=row_id,
)
def test_the_run_goes_on_without_its_parameter_server_or_a_shard(scripts, chapter, actor, line):
    trainer = start_learning(scripts, chapter, *LONG)
    ray_of(trainer.pid, actor)[0].kill()
    scripts.wait_for("r", f"run.log:{line}", trainer)
    scripts.wait_until(lambda: ray_of(trainer.pid, actor), trainer)
    path = scripts.runs_dir / "runs/r/episodes.csv"
    games = len(path.read_text().splitlines())
    scripts.wait_until(lambda: len(path.read_text().splitlines()) > games + 5, trainer)
    done = end(scripts, trainer)
    assert done.code == 143
    assert done.summary["worker_restarts"] == 0, "no rollout is lost"


@SLOW
@pytest.mark.parametrize(
    ("chapter", "lost"),
    [
        (RAY_IMPALA, ["gcs_server"]),
        (RAY_IMPALA, ["gcs_server", "ray::ParameterServer", "ray::RayWorker"]),
        (RAY_DQN, ["gcs_server", "ray::ReplayShard", "ray::RayWorker"]),
    ],
    ids=["head", "and all of its machine", "and a shard"],
)
def test_without_the_head_the_run_is_saved(scripts, chapter, lost):
    trainer = start_learning(scripts, chapter, *LONG)
    for process in [ray_of(trainer.pid, word)[0] for word in lost]:
        process.kill()
    done = scripts.finish(trainer, "r", timeout=40)
    assert done.code == 1
    assert "the head of the Ray cluster has not answered for 8 s" in done.summary["exit_reason"]
    assert "error: the head of the Ray cluster" in done.out
    assert "continue with " in done.out
    assert done.state["steps"] == done.summary["steps"] > 0


@SLOW
@pytest.mark.parametrize("time_of_ten", range(5))
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run_with_a_checkpoint_in_8_seconds(scripts, signum, code, time_of_ten):
    trainer = start_learning(scripts, (RAY_IMPALA, RAY_DQN)[time_of_ten % 2], *LONG)
    began = time.monotonic()
    trainer.send_signal(signum)
    time.sleep(0.2)
    trainer.send_signal(signal.SIGSTOP)  # it takes long to end: Ray's own handler would abort it 3 s after SIGTERM
    time.sleep(3)
    trainer.send_signal(signal.SIGCONT)
    trainer.wait(60)
    passed, done = time.monotonic() - began, scripts.finish(trainer, "r")
    assert done.code == code
    assert done.state["steps"] == done.summary["steps"] > 0
    assert passed < 8 + 3


@SLOW
def test_a_trainer_that_is_killed_leaves_nothing(scripts):
    trainer = start_learning(scripts, RAY_IMPALA, *LONG)
    before = processes_of_ray(scripts)
    assert before
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 5
    while (left := [*still_alive(before), *folders(scripts)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


TWICE = """
import sys, threading
import train_ray

without_token = sys.argv[1]

def run(name, *flags):
    sys.argv[1:] = ["--env-id", "CartPole-v1", "--num-envs", "2", "--total-steps", "200", "--run-name", name, *flags]
    print(name, "ends with", train_ray.main(), flush=True)

if __name__ == "__main__":
    run("first", "--num-actors", "1")
    try:
        run("refused", "--num-actors", "1", "--num-learners", "2")
    except Exception as error:
        print(error, flush=True)
    run("third", "--address", without_token, "--insecure-cluster")
    (thread := threading.Thread(target=run, args=("second", "--num-actors", "2"))).start()
    thread.join()
"""


@SLOW
def test_several_runs_in_one_process_also_in_a_thread_and_after_one_that_is_refused(scripts):
    """Ray keeps the token of the first cluster, and each has its own, or none."""
    (script := scripts.runs_dir / "twice.py").write_text(TWICE)
    with without_token() as address:
        out, err = (process := scripts.start(str(script), address)).communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    ends = [line for line in out.splitlines() if "ends with" in line]
    assert ends == ["first ends with 0", "third ends with 0", "second ends with 0"]
    assert "num-learners=2: 1 actors cannot be divided evenly" in out
    assert not (scripts.runs_dir / "runs/refused").exists()


@SLOW
def test_a_scheduler_s_warning_to_all_processes_ends_a_run_with_a_checkpoint(scripts):
    trainer = start_learning(scripts, RAY_IMPALA, *LONG)
    for process in [*psutil.Process(trainer.pid).children(recursive=True), psutil.Process(trainer.pid)]:
        process.send_signal(signal.SIGUSR1)
    done = scripts.finish(trainer, "r", timeout=30)
    assert (done.code, done.err) == (138, "")
    assert done.state["steps"] == done.summary["steps"] > 0


# ---- two nodes


@pytest.fixture
def start_node(tmp_path, monkeypatch, scripts):
    """Starts nodes with `python -m a3c_mp.cluster`, with one place each; `start_node.address` is that of the head."""
    monkeypatch.setenv("A3C_MP_HOME", str(tmp_path / "home"))

    def start(command, *flags, **popen):
        where = ["--port", start.address.partition(":")[2]] if command == "head" else [start.address]
        node = scripts.start("a3c_mp.cluster", command, *where, "--num-cpus", "1", *flags, **popen)
        line = node.stdout.readline()
        assert "cluster at" in line, node.communicate()
        return node

    start.address = f"127.0.0.1:{free_port()}"
    return start


@pytest.fixture
def gpu(monkeypatch):
    """Gives torch virtual GPUs in the processes that are started afterwards: `gpu(number)`."""
    if why := library.missing():
        pytest.skip(why)
    library.built()
    monkeypatch.setenv("PYTHONPATH", str(Path(library.__file__).parent / "start"))
    return lambda number: monkeypatch.setenv("VIRTUAL_GPUS", number)


@SLOW
def test_two_nodes_give_the_same_weights_and_one_may_be_lost(scripts, start_node):
    start_node("head")
    second = start_node("join")
    on_two = scripts.run(RAY_IMPALA, *DETERMINISTIC, "--address", "auto", name="two")
    assert on_two.code == 0, on_two.err
    alone = scripts.run(IMPALA, *DETERMINISTIC, name="alone")
    assert on_two.summary["weights_sha256"] == alone.summary["weights_sha256"]

    trainer = start_learning(scripts, RAY_IMPALA, *LONG, "--address", start_node.address, "--max-restarts", "0")
    ray_of(second.pid, "/raylet ")[0].kill()
    scripts.wait_for("r", "run.log:was lost with its node", trainer, timeout=20)
    scripts.wait_for("r", "run.log:waits for a node with 1 CPU free", trainer, timeout=60)
    start_node("join")
    scripts.wait_for("r", "run.log:has found a place", trainer, timeout=60)
    done = end(scripts, trainer)
    assert done.code == 143
    assert done.config["args"]["address"] == start_node.address


@SLOW
@pytest.mark.parametrize("lost", [0, 1])
def test_two_trainers_on_two_nodes_have_the_weights_of_two_in_chapter_4_also_where_one_is_killed(
    scripts, start_node, lost
):
    flags = [*TWO_LEARNERS, "--deterministic", "--total-steps", "6000", "--checkpoint-steps", "1000"]
    start_node("head")
    second = start_node("join")
    driver = scripts.train(RAY_IMPALA, *flags, "--address", "auto")
    scripts.wait_for_game(driver)
    trainers = [*ray_of(driver.pid, "train_ray.py"), *ray_of(second.pid, "ray::RayLearner")]
    assert open_to([*trainers, psutil.Process(driver.pid)]) == {"127.0.0.1"}
    trainers[lost].kill()
    how = [f"learner 0 (pid {trainers[0].pid}) was killed by SIGKILL"]
    how += [
        f"learner 1 (pid {trainers[1].pid}) at 127.0.0.1 died; all learners end, because they take every step together"
    ]
    scripts.wait_for("r", f"run.log:{how[lost]}; restart 1 of 5", driver)
    done = scripts.finish(driver, "r", timeout=300)
    assert done.code == 0, done.err
    alone = scripts.finish(scripts.train(IMPALA, *flags, name="alone"), "alone", timeout=300)
    assert done.summary["weights_sha256"] == alone.summary["weights_sha256"]


@SLOW
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_driver_alone_ends_all_of_a_run(scripts, signum):
    driver = start_learning(scripts, RAY_IMPALA, *TWO_LEARNERS, *LONG)
    before = processes_of_ray(scripts) | {*psutil.Process(driver.pid).children(recursive=True)}
    driver.send_signal(signum)
    done = scripts.finish(driver, "r", timeout=30)
    assert done.code == (-signum if signum == signal.SIGKILL else 128 + signum)
    deadline = time.monotonic() + 10
    while (left := [*still_alive(before), *folders(scripts)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    if signum != signal.SIGKILL:
        assert done.state["steps"] == done.summary["steps"] > 0


@SLOW
def test_trainers_of_two_machines_connect_where_their_nodes_do(scripts, start_node, cable):
    """Each has its share of the replay shards."""
    start_node.address = f"10.231.7.1:{free_port()}"
    start_node("head", "--host", "10.231.7.1")
    cable("-n a3c-test link set lo up")
    second = start_node("join", prefix=["ip", "netns", "exec", "a3c-test"])
    trainer = start_learning(scripts, RAY_DQN, *LONG, "--address", "auto", "--num-learners", "2")
    (peer,) = ray_of(second.pid, "ray::RayLearner")
    peer.kill()
    died = f"learner 1 (pid {peer.pid}) at 10.231.7.2 died; all learners end, because they take every step together"
    scripts.wait_for("r", f"run.log:{died}; restart 1 of 5", trainer)
    path = scripts.runs_dir / "runs/r/episodes.csv"
    games = len(path.read_text().splitlines())
    scripts.wait_until(lambda: len(path.read_text().splitlines()) > games + 50, trainer)
    done = end(scripts, trainer)
    assert done.code == 143, done.err
    assert done.summary["updates"] > 0


@SLOW
def test_actors_and_shards_are_spread_over_nodes_or_packed(scripts, start_node):
    nodes = [start_node(command, "--num-cpus", "2") for command in ("head", "join", "join")]
    for placement, expected in (("spread", ([1, 1, 1], [1, 1, 1])), ("pack", ([0, 1, 2], [0, 0, 3]))):
        flags = ["--num-actors", "3", "--num-shards", "3", "--address", "auto", "--placement", placement]
        trainer = scripts.train(RAY_DQN, *LONG, *flags, name=placement)
        for kind, counts in zip(("ray::RayWorker", "ray::ReplayShard"), expected, strict=True):
            scripts.wait_until(lambda: sum(len(ray_of(node.pid, kind)) for node in nodes) == 3, trainer)  # noqa: B023
            assert sorted(len(ray_of(node.pid, kind)) for node in nodes) == counts, (placement, kind)
        trainer.terminate()
        assert scripts.finish(trainer, placement).code == 143


@SLOW
def test_actors_act_on_gpus_that_nodes_declare_and_what_has_no_place_is_named(scripts, start_node, gpu):
    start_node("head", "--num-cpus", "2", "--num-gpus", "0")
    gpu("1")
    with_gpu = start_node("join", "--num-cpus", "3", "--num-gpus", "1")
    on_cluster = ["--address", "auto", "--num-actors", "3"]
    refused = scripts.run(RAY_IMPALA, *on_cluster, "--cuda", "--trainer-gpus", "0.5", name="trainer")
    why = "trainer-gpus=0.5: on its node, at 127.0.0.1, the trainer needs a node with 0.5 GPU free; 0 of 0 GPU are free"
    assert refused.code == 2
    assert why in refused.err
    trainer = scripts.train(RAY_IMPALA, *LONG, *on_cluster, "--actor-gpus", "0.5")
    waits = "a node with 1 CPU and 0.5 GPU free; 3 of 5 CPUs and 0 of 1 GPU are free on 2 nodes"
    scripts.wait_for("r", f"run.log:waits for {waits}", trainer)
    scripts.wait_until(lambda: len(ray_of(with_gpu.pid, "ray::RayWorker")) == 2, trainer)
    gpu("0")
    start_node("join", "--num-cpus", "1", "--num-gpus", "1")
    scripts.wait_for(
        "r", "run.log:which is not used: actor-gpus=0.5: RuntimeError: CUDA error: invalid device", trainer
    )
    gpu("1")
    start_node("join", "--num-cpus", "1", "--num-gpus", "1")
    scripts.wait_for("r", "run.log:has found a place", trainer)
    scripts.wait_for_game(trainer)
    out = end(scripts, trainer).out
    assert "2 nodes, 5 CPUs, 1 GPU; 3 actors wanted" in out
    assert "actors act on the GPUs of their nodes, each on 0.5 of one" in out


@SLOW
@pytest.mark.parametrize("chapter", [RAY_IMPALA, RAY_DQN], ids=row_id)
def test_trainer_and_actors_share_the_gpu_of_this_machine(scripts, gpu, chapter):
    gpu("1")
    flags = ["--cuda", "--trainer-gpus", "0.5", "--actor-gpus", "0.25", "--total-steps", "2000"]
    done = scripts.run(chapter, *flags)
    assert (done.code, done.summary["worker_restarts"]) == (0, 0), done.err
    assert done.summary["updates"] > 0


ODD = """
import os
import gymnasium
import numpy as np

class Odd(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (int(os.environ.get("SIZE", 4)),), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(self.observation_space.shape, np.float32), 1.0, self.left == 0, False, {}

gymnasium.register("Odd-v0", Odd)
"""


@SLOW
def test_a_node_with_another_environment_is_refused_and_one_that_joins_later_is_not_used(
    scripts, start_node, monkeypatch
):
    (scripts.runs_dir / "odd.py").write_text(ODD)
    odd = [*LONG, "--env-id", "odd:Odd-v0", "--address", "auto"]
    head = start_node("head", "--node-ports", "7600", "7640")
    ports = {at.laddr.port for p in ray_of(head.pid, "") for at in p.net_connections() if at.status == "LISTEN"}
    assert {7600, 7601} <= ports, "those of its raylet"
    trainer = start_learning(scripts, RAY_IMPALA, *odd, "--num-actors", "1")
    end(scripts, trainer)
    monkeypatch.setenv("SIZE", "6")
    other = start_node("join")
    monkeypatch.delenv("SIZE")
    refused = scripts.finish(scripts.train(RAY_IMPALA, *odd, name="refused"), "refused")
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert "this node cannot work in this run: env-id=odd:Odd-v0: its observations are Box(-1.0, 1.0, (6,)" in line
    other.terminate()
    other.wait(30)
    trainer = scripts.train(RAY_IMPALA, *odd, name="later")
    scripts.wait_for("later", "run.log:actor 1 waits for a node with 1 CPU free", trainer)
    monkeypatch.setenv("SIZE", "6")
    start_node("join")
    scripts.wait_for("later", "run.log:which is not used: env-id=odd:Odd-v0", trainer)
    monkeypatch.delenv("SIZE")
    start_node("join")
    scripts.wait_for("later", "run.log:actor 1 has found a place", trainer)


@SLOW
def test_a_second_head_leaves_the_first_ones_address_and_takes_its_place_at_its_end(scripts, start_node):
    def found():
        return scripts.start("a3c_mp.cluster", "status").communicate(timeout=60)[0].partition(":")[2].partition(":")[0]

    first = start_node("head")
    port = start_node.address.partition(":")[2]
    refused = scripts.start("a3c_mp.cluster", "head", "--port", port)
    assert (refused.communicate(timeout=60)[1].count("\n"), refused.returncode) == (1, 2)
    start_node.address = f"127.0.0.1:{(other := free_port())}"
    start_node("head")
    assert found() == port
    first.kill()
    scripts.wait_until(lambda: found() == str(other), scripts.started[2])


@SLOW
def test_a_node_that_the_head_cannot_reach_says_so(scripts, start_node, cable):
    """It is there for others at an address that only its own machine knows."""
    start_node.address = f"10.231.7.1:{free_port()}"
    start_node("head", "--host", "10.231.7.1")
    cable("-n a3c-test link set lo up")
    cable("-n a3c-test addr add 10.231.8.2/32 dev lo")
    cable("route add blackhole 10.231.8.2/32")
    try:
        prefix = ["ip", "netns", "exec", "a3c-test"]
        node = scripts.start("a3c_mp.cluster", "join", start_node.address, "--host", "10.231.8.2", prefix=prefix)
        out, err = node.communicate(timeout=90)
    finally:
        cable("route del blackhole 10.231.8.2/32")
    assert node.returncode == 2, (out, err)
    assert "error: host=10.231.8.2: the head cannot connect to this node there and has given it up" in err


@SLOW
def test_a_run_is_saved_where_its_node_is_ended_at_the_same_time(scripts, start_node):
    """As at the shutdown of a machine."""
    node = start_node("head")
    trainer = start_learning(scripts, RAY_IMPALA, *LONG, "--address", "auto", "--num-actors", "1")
    node.terminate()
    done = end(scripts, trainer)
    assert done.code == 143, done.err
    assert done.state["steps"] == done.summary["steps"] > 0
    assert node.wait(10) == 0, "it does not wait longer than for the run"


@SLOW
def test_a_cluster_is_for_those_who_have_its_token(scripts, start_node, tmp_path):
    start_node("head")
    assert (tmp_path / "home/ray_token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "wrong").write_text("0" * 64)
    (tmp_path / "wrong").chmod(0o600)
    token = ["--token-file", str(tmp_path / "wrong")]
    for program, *flags in (
        ["a3c_mp.cluster", "join", start_node.address],
        ["train_ray.py", "--address", start_node.address],
    ):
        process = scripts.start(program, *flags, *token)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.count("\n")) == (2, "", 1), (out, err)
        assert err.startswith(f"error: address={start_node.address}: the cluster refuses the token")
    status = scripts.start("a3c_mp.cluster", "status")
    assert "1 node, 1 places for actors free" in status.communicate(timeout=60)[0]


@SLOW
def test_a_cluster_without_a_token_is_joined_where_that_is_wanted(scripts):
    with without_token() as address:
        joined = scripts.run(RAY_IMPALA, "--address", address, "--insecure-cluster", "--total-steps", "2000")
    assert joined.code == 0, joined.err
    assert joined.summary["worker_restarts"] == 0


@contextmanager
def without_token():
    """A node with two places, whose cluster has no token; gives its address."""
    address = f"127.0.0.1:{free_port()}"
    options = ["--head", f"--port={address[10:]}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    with closing(Node([*options, "--num-cpus=2"], environment(ClusterAddress(address, "")))) as node:
        node.wait_for_start()
        yield address
