"""Chapter 5 across machines: nodes that join a running task, leave it, lose it, or are refused."""

import json
import os
import re
import signal
import stat
import time

import numpy as np
import psutil
import pytest
import torch
import zmq
from envs import Env
from gymnasium.spaces import Box, Discrete
from harness import Scripts, family_of, still_alive
from nodes import free_port

import a3c_mp
import train_task
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.run import checkpoint
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.exchange import FILLED, JOIN, SETUP, TOKEN
from a3c_mp.wrappers import make_env

ENV_ID = "CartPole-v1"
NUM_ENVS, UNROLL_LENGTH = 4, 8
SMALL = ("--num-envs", str(NUM_ENVS), "--unroll-length", str(UNROLL_LENGTH), "--batch-size", "32")
ENDLESS = ("--stop-return", "501", "--total-steps", "1e9", "--checkpoint-steps", "500")


class Machine:
    """A command, and what it has printed so far."""

    def __init__(self, scripts, number, *flags, prefix=()):
        self.scripts, self.path = scripts, scripts.runs_dir / f"printed-{number}"
        with open(self.path, "w") as file:
            self.process = scripts.start("train_task.py", *flags, prefix=prefix, stdout=file, stderr=file)

    @property
    def printed(self):
        return self.path.read_text()

    def wait_for(self, text, times=1, timeout=120):
        """Wait until a text that matches has been printed so often; returns the last match."""
        self.scripts.wait_until(lambda: len(re.findall(text, self.printed)) >= times, self.process, timeout)
        return list(re.finditer(text, self.printed))[times - 1]

    def end(self, timeout=60):
        """Wait for its end; returns exit code."""
        return self.process.wait(timeout)


class Hub(Machine):
    """A task that listens, in the run folder `r`."""

    def __init__(self, scripts, *flags, host="127.0.0.1"):
        listen = ("--listen", f"tcp://{host}:{free_port()}", "--key-file", "k")
        super().__init__(scripts, "hub", "--env-id", ENV_ID, "--run-name", "r", *listen, *flags)
        self.folder = scripts.runs_dir / "runs" / "r"
        self.key_file = scripts.runs_dir / "k"
        self.address = self.wait_for(r"listening at (\S+),")[1]

    def attach(self, number, role, *flags, prefix=()):
        where = ("--attach-to", self.address, "--key-file", "k")
        return Machine(self.scripts, number, *where, "--role", role, *flags, prefix=prefix)

    def wait_for_steps(self):
        """Wait until it has saved twice: it trains."""
        for _ in range(2):
            before = self.newest()
            self.scripts.wait_until(lambda before=before: self.newest() != before, self.process)

    def newest(self):
        return checkpoint.list_checkpoints(self.folder / "checkpoints")[:1]

    @property
    def log(self):
        return (self.folder / "run.log").read_text()

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def start_hub(scripts):
    return lambda *flags, **how: Hub(scripts, *flags, **how)


# ---- they join, leave, and are lost


def test_collectors_of_other_machines_train_a_hub_that_has_none_and_survive_kills_and_stops(start_hub):
    hub = start_hub("--num-actors", "0", *SMALL, *ENDLESS, "--eval-every", "2000", "--eval-episodes", "2")
    collector = hub.attach(1, "collector", "--num-actors", "1")
    evaluator = hub.attach(2, "evaluator")
    pid = int(collector.wait_for(r"collector 0 \(pid (\d+)\) has joined")[1])
    hub.wait_for("evaluator joined")
    hub.wait_for_steps()
    os.kill(pid, signal.SIGKILL)
    collector.wait_for(rf"collector 0 \(pid {pid}\) was killed by SIGKILL; restart 1 of 5")
    hub.wait_for("collector 0 joined", times=2)
    hub.wait_for_steps()
    pid = int(collector.wait_for(r"collector 0 \(pid (\d+)\) has joined", times=2)[1])
    os.kill(pid, signal.SIGSTOP)
    hub.wait_for("collector 0 left", times=2)
    os.kill(pid, signal.SIGCONT)
    hub.wait_for("collector 0 joined", times=3)
    hub.wait_for_steps()
    assert collector.printed.count("has joined") == 3
    hub.wait_for("evaluation 1: ")
    evaluator.process.send_signal(signal.SIGINT)
    assert evaluator.end() == 130
    hub.wait_for("evaluator left")
    assert evaluator.printed.endswith(f"left {hub.address}\n")
    hub.wait_for_steps()
    hub.process.send_signal(signal.SIGTERM)
    assert hub.end() == 143
    assert collector.end() == 0
    assert collector.printed.endswith("the task has ended\n")
    assert hub.summary["worker_restarts"] == 0
    assert len(re.findall("INFO collector 0 (joined|left)", hub.log)) >= 5
    assert "WARNING" not in hub.log.replace("WARNING no collector is connected", "")  # on a slow machine


@pytest.mark.slow
def test_a_node_that_is_terminated_leaves_and_all_end_when_the_hub_is_killed(start_hub):
    hub = start_hub("--num-actors", "1", *SMALL, *ENDLESS, "--eval-every", "0")
    first, second = (hub.attach(number, "collector", "--num-actors", "1") for number in (1, 2))
    for machine in (first, second):
        machine.wait_for("has joined")
    hub.wait_for_steps()
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    hub.wait_for(r"collector \d left")
    hub.wait_for_steps()
    family = family_of(hub.process.pid) + family_of(second.process.pid)
    lines = second.printed.count("\n")
    killed = time.monotonic()
    hub.process.kill()
    assert second.end() == 1
    assert time.monotonic() - killed < 10
    assert second.printed.count("\n") == lines + 1
    assert second.printed.splitlines()[-1].startswith(f"error: {hub.address} refuses connections")
    assert not still_alive(family)


@pytest.mark.slow
def test_a_hub_goes_on_while_the_link_to_a_collector_is_down(start_hub, cable):
    hub = start_hub("--num-actors", "1", *SMALL, *ENDLESS, host="10.231.7.1")
    machine = hub.attach(1, "collector", "--num-actors", "1", prefix=("ip", "netns", "exec", "a3c-test"))
    hub.wait_for("collector 1 joined")
    hub.wait_for_steps()
    cable("link set a3c-hub down")
    begin = time.monotonic()
    hub.wait_for("collector 1 left")
    machine.wait_for("does not answer")
    assert time.monotonic() - begin < 15
    hub.wait_for_steps()
    games = (hub.folder / "episodes.csv").read_text().count("\n")
    hub.scripts.wait_until(
        lambda: (hub.folder / "episodes.csv").read_text().count("\n") > games + 10, hub.process
    )  # no game of the collector that left is waited for
    time.sleep(10)
    cable("link set a3c-hub up")
    begin = time.monotonic()
    hub.wait_for("collector 1 joined", times=2)
    machine.wait_for("answers again")
    assert time.monotonic() - begin < 10
    hub.wait_for_steps()
    hub.process.send_signal(signal.SIGINT)
    assert hub.end() == 130
    assert machine.end() == 0


# ---- they are refused


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """A hub with one place for a collector of another machine, and no evaluations."""
    flags = ("--num-actors", "1", "--remote-actors", "1", "--eval-every", "0")
    with Scripts(tmp_path_factory.mktemp("standing")) as scripts:
        hub = Hub(scripts, *flags, *SMALL, *ENDLESS)
        yield hub
        hub.process.terminate()
        assert hub.end() == 143


@pytest.fixture
def refused_by(standing, refused):
    """The one line with which an attempt to join ends, while the hub goes on."""

    def run(*flags, key_file=standing.key_file):
        begin = time.monotonic()
        line = refused(train_task.main, ["--attach-to", standing.address, "--key-file", str(key_file), *flags])
        assert time.monotonic() - begin < 10
        standing.wait_for_steps()
        return line

    return run


def test_a_wrong_key_is_one_line_there_and_one_here(refused_by, standing, tmp_path):
    (tmp_path / "other").write_bytes(zmq.curve_keypair()[1])
    (tmp_path / "other").chmod(0o600)
    assert "has another one" in refused_by("--role", "collector", key_file=tmp_path / "other")
    standing.wait_for("a connection was refused: another key")


def test_another_version_is_refused(refused_by, standing, monkeypatch):
    monkeypatch.setattr(a3c_mp, "__version__", "0.0.1")
    theirs = json.loads((standing.folder / "config.json").read_text())["versions"]["a3c_mp"]
    assert f"a3c_mp 0.0.1 instead of {theirs}" in refused_by("--role", "collector")
    assert "a node with other versions was refused" in standing.log


class Other(Env):
    """It has another length of observations, and another number of actions."""

    observation_space = Box(-1, 1, (7,), np.float32)
    action_space = Discrete(3)
    obs = np.zeros(7, np.float32)


def test_an_environment_with_other_spaces_is_refused_in_one_line_on_both_sides(refused_by, standing, register):
    register(ENV_ID, Other)
    line = refused_by("--role", "collector")
    differs = "actions Discrete(3) instead of Discrete(2), observations float32 [7] instead of float32 [4]"
    assert "this node is refused: it has a net of " in line
    assert differs in line
    standing.wait_for("a node with another environment was refused .*" + re.escape(differs))


def test_an_evaluator_for_a_task_without_evaluations_is_refused(refused_by):
    assert "the task there has no evaluations" in refused_by("--role", "evaluator")


# ---- what others send


@pytest.fixture
def intruder(standing, net):
    """A node that has the key and no manners, in the place of a collector: its router, and its first token."""
    router = net.enter(Endpoint(dials=standing.address, key_file=standing.key_file))
    while True:
        router.send(JOIN, "intruder")
        answer = net.take(router, 1)[0]
        if answer.event == SETUP:
            return router, answer.args[2][0][0]
        time.sleep(0.2)  # the place of the intruder before is not free yet


def rollout(**changes):
    """Fields of a rollout of zeros."""
    env = make_env(ENV_ID)
    spec = rollout_spec(UNROLL_LENGTH, NUM_ENVS, env.observation_space, env.action_space)
    fields = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def test_one_collector_too_many_is_refused(standing, intruder):
    machine = standing.attach(1, "collector", "--num-actors", "1")
    assert machine.end() == 2
    assert machine.printed.splitlines()[-1].startswith(f"error: attach-to={standing.address}: its 1 places")
    standing.wait_for("a collector was refused: all 1 places are taken")
    standing.wait_for_steps()


def test_malformed_messages_of_a_collector_are_dropped_and_a_good_one_counts(standing, intruder, net):
    router, slot = intruder
    before = standing.printed.count("dropped")
    good = rollout()
    for event, *args in [
        (FILLED,),
        (FILLED, slot, 0),
        (FILLED, "0", 0, good),
        (FILLED, slot, "0", good),
        (FILLED, slot + 1, 0, good),
        (FILLED, -1, 0, good),
        (FILLED, 10**9, 0, good),
        (FILLED, slot, 0, None),
        (FILLED, slot, 0, []),
        (FILLED, slot, 0, rollout(obs=None)),
        (FILLED, slot, 0, rollout(extra=torch.zeros(1))),
        (FILLED, slot, 0, rollout(reward=torch.zeros(1))),
        (FILLED, slot, 0, rollout(reward=good["reward"].double())),
        (FILLED, slot, 0, rollout(reward="much")),
        ("slots.not_restored", 1),
        (JOIN, 5),
    ]:
        router.send(event, *args)
    router.send(FILLED, slot, 0, good)
    router.send(FILLED, slot, 0, good)  # once more, which is one time too many
    [(_, event, args)] = net.take(router, 1)
    assert (event, args[0][0]) == (TOKEN, slot), "it was learned from"
    standing.scripts.wait_until(lambda: standing.printed.count("dropped") > before + 2, standing.process)
    standing.wait_for_steps()
    assert "Traceback" not in standing.printed


# ---- what is open to others


def listening_ports(process):
    family = [process, *family_of(process.pid)]
    found = [link for member in family for link in psutil.Process(member.pid).net_connections("tcp")]
    return [link.laddr.port for link in found if link.status == psutil.CONN_LISTEN]


def test_a_hub_listens_at_one_port_and_keeps_its_key_to_itself(standing):
    assert listening_ports(standing.process) == [int(standing.address.rpartition(":")[2])]
    assert stat.S_IMODE(standing.key_file.stat().st_mode) == 0o600


@pytest.mark.slow
def test_by_default_there_is_no_port_and_sockets_are_in_a_folder_of_the_user(scripts, tmp_path):
    (tmp_path / "t").mkdir()
    flags = ("--env-id", ENV_ID, "--run-name", "r", "--num-actors", "1", *SMALL, *ENDLESS, "--eval-every", "0")
    process = scripts.start("train_task.py", *flags, prefix=("env", f"TMPDIR={tmp_path / 't'}"))
    scripts.wait_until(lambda: checkpoint.list_checkpoints(tmp_path / "runs/r/checkpoints"), process)
    assert len(family_of(process.pid)) == 1, "a collector"
    assert listening_ports(process) == []
    [folder] = (tmp_path / "t").glob("a3c-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.terminate()
    assert scripts.finish(process, "r").code == 143
    assert not folder.exists()
