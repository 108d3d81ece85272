"""Every chapter with --cuda on a virtual GPU: it keeps the rules, and waits and launches no more than it has to."""

from dataclasses import dataclass, replace

import pytest
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DDPG,
    APEX_DQN,
    APEX_TD3,
    CHAPTERS,
    IMPALA,
    POPULATION,
    POPULATION_PPO,
    RAY_DQN,
    RAY_IMPALA,
    TASK,
    Chapter,
    actors_of,
)

PENDULUM, PONG, MASKED, CRASH = "Pendulum-v1", "PongNoFrameskip-v4", "envs:Masked-v0", "envs:Crash-v0"
GENERATION = ("--total-steps", "160", "--generation-steps", "80", "--learning-starts", "40", "--eval-max-steps", "20")
SMALL_NETS = ("--convolutions", "8", "8", "4", "12", "4", "2", "--hidden", "16", "--channels-range", "4", "16")
SHORT, DRAWING = ("--total-steps", "320"), ("--total-steps", "600", "--learning-starts", "200")
ONE_ACTOR, EVALUATED = ("--num-actors", "1"), ("--eval-every", "200", "--eval-episodes", "1")


@dataclass(frozen=True)
class Case:
    """A run on the virtual GPU."""

    chapter: Chapter
    flags: tuple[str, ...] = SHORT
    env_id: str = ""
    launches: tuple[float, float, float] = (0, 0, 0)
    """budget: most launches of an actor for each step, and of a learner for each update; most operations in a graph of
    a learner's step; 0: not checked"""
    gpus: int = 1

    @property
    def row(self) -> Chapter:
        return replace(self.chapter, env_id=self.env_id or self.chapter.env_id)


QUICK = {
    "a3c_data": Case(A3C_DATA, launches=(1, 10, 170)),
    "a3c_data, images": Case(A3C_DATA, ("--total-steps", "96", *ONE_ACTOR), PONG, (1, 20, 190)),
    "a3c_grad": Case(A3C_GRAD, launches=(18, 16, 0)),
    "apex_dqn": Case(APEX_DQN, (*DRAWING, *ONE_ACTOR), launches=(1, 9, 165)),
    "impala, lstm": Case(IMPALA, (*SHORT, *ONE_ACTOR, "--lstm"), launches=(1, 30, 1050)),
    "task, evaluated": Case(TASK, (*SHORT, *ONE_ACTOR, *EVALUATED), launches=(1, 10, 170)),
}
OTHERS = {
    "a3c_data, continuous": Case(A3C_DATA, ("--total-steps", "3300", "--noise-steps", "4"), PENDULUM),
    "a3c_data, masks": Case(A3C_DATA, env_id=MASKED),
    "a3c_data, evaluated": Case(A3C_DATA, (*SHORT, *EVALUATED)),
    "a3c_grad, deterministic": Case(A3C_GRAD, (*SHORT, "--deterministic")),
    "a3c_grad, continuous": Case(A3C_GRAD, env_id=PENDULUM),
    "a3c_grad, images": Case(A3C_GRAD, ("--total-steps", "200"), PONG),
    "apex_dqn, images": Case(APEX_DQN, DRAWING, PONG),
    "apex_dqn, two GPUs": Case(APEX_DQN, (*DRAWING, "--num-learners", "2"), gpus=2),
    "apex_ddpg": Case(APEX_DDPG, DRAWING, launches=(1, 10, 210)),
    "apex_td3": Case(APEX_TD3, DRAWING),
    "impala, images": Case(IMPALA, ("--total-steps", "300"), PONG),
    "impala, two GPUs": Case(IMPALA, (*SHORT, "--num-learners", "2"), gpus=2),
    "task, threads": Case(TASK, (*SHORT, "--standalone", "--async-mode")),
    "ray_impala": Case(RAY_IMPALA),
    "ray_dqn": Case(RAY_DQN, DRAWING),
}
assert {case.chapter.algorithm for case in (QUICK | OTHERS).values()} >= {chapter.algorithm for chapter in CHAPTERS}
SLOW = ("a3c_data", *OTHERS)  # the first has most of its code in common with its images, and with chapter 5
CASES = [*(name for name in QUICK if name not in SLOW), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

WAITS = {
    "precision.acting_forward.<locals>.forward": {"step": 1, "load": 2},  # the first of a run; games that are truncated
    "transitions.TransitionCollector.fill": {"load": 1},  # the scale of rewards
    "gradients.Outbox.collect": {"load": 1},
    "gradients.Outbox.write": {"load": 6},
    "gradients.Outbox.write.<locals>.<listcomp>": {"load": 1},  # in Python 3.11; where actions lie at their bounds
    "learner.Learner._copied": {"update": 2},  # rewards and ends of games, for the scale of rewards
    "resume_states.ResumeStates.write": {"load": 2},  # of deterministic runs
    "weights.Weights._wait_for_copies": {"load": 1},
    "weights.Weights.publish": {"load": 1},  # for actors on the CPU
    "actor_critic.action_metrics.<locals>.<genexpr>": {"load": 2},  # bounds of continuous actions
    "obs_stats.VectorStats.update": {"load": 1},
    "obs_stats.ImageStats.update.<locals>.<dictcomp>": {"load": 1},
    "graph_step.GraphStep.settle": {"load": 1},
    "train_apex.learn": {"update": 1},
    "td3.with_noise": {"update": 1},  # drawn on the CPU, as a resumed run draws the same
    "gradients.MeanGradient.add": {"update": 2},  # one for each gradient in a step
    "gradients.GradientSetup._accept": {"update": 4},
    "parameters.Publisher._share": {"update": 1},
}
"""budget: most waits in a function for each step of an actor, each load or publication of weights, and each update"""
WITH_OTHERS = {"progress.NonFiniteFilter.check": {"update": 1}}
"""and where there are several learners, who take steps without a graph"""
NOW_AND_THEN = (
    "checkpoint.", "metrics.", "evaluation.", "spawn.", "gpu.", "precision.acting_forward",
    "precision.as_graph", "collector.RolloutCollector.__init__", "actor.Memory.place",
    "actor_critic.A3CSetup.__init__", "actor_critic.A3CSetup.slot_spec", "apex.ApexSetup",
    "graph_step.GraphStep._capture", "graph_step.GraphStep.take_means", "train_a3c_grad.actor", "learner_group.",
    "weights.Weights.load_state_dict",
)  # fmt: skip
"""functions that may wait, as they are called at the start, or once a second and more rarely"""
START = 100
"""launches of a process before its first step"""


def excess(ran, case):
    """What processes of a run did that is not in the budgets."""
    found, budgets = [], WAITS | (WITH_OTHERS if case.gpus > 1 else {})
    for process in ran.processes:
        launches, waits = process["launches_by"], process["waits_by"]
        loads = 1 + launches.get("weights.Weights.load", 0) + launches.get("weights.Weights.publish", 0)
        updates, args = ran.done.summary["updates"], ran.done.config["args"]
        length = args.get("block_length", args.get("unroll_length"))
        steps = 1 + process.get("replays", length * loads)  # several learners take steps without a graph
        units = {"step": steps, "load": loads, "update": updates}
        for function, number in waits.items():
            most = sum(count * units[unit] for unit, count in budgets.get(function, {}).items())
            if number > most and (function in budgets or not function.startswith(NOW_AND_THEN)):
                found.append(f"{process['process']}: {number} waits in {function} ({units})")
        waits_for_weights = sum(waits.get(f"weights.Weights.{name}", 0) for name in ("_wait_for_copies", "publish"))
        if waits_for_weights < loads - 2:  # a process may be ended between its last copy and the wait for it
            found.append(f"{process['process']}: weights are read or published without a wait")
        number = sum(count for name, count in launches.items() if not name.startswith(NOW_AND_THEN))
        per_step, per_update, per_graph = case.launches
        in_graphs = process.get("captured", 0)  # launched before: by an actor four times, by a learner once
        most = START + (per_step * steps + 4 * in_graphs if process in ran.actors else per_update * updates + in_graphs)
        if any(case.launches) and number > most:
            found.append(f"{process['process']}: {number} launches ({units})")
        if per_graph and process in ran.learners and in_graphs > per_graph * process.get("captures", 0):
            found.append(f"{process['process']}: {in_graphs} operations in {process.get('captures', 0)} graphs")
    return found


def strangers(ran):
    """Processes that used the GPU and are neither learners nor actors."""
    own = ran.learners + ran.actors + ran.role("ray", "ipc-check")
    return [process["process"] for process in ran.processes if process not in own]


@pytest.mark.parametrize("name", CASES)
def test_a_chapter_keeps_the_rules_of_a_gpu(gpu, name):
    case = (QUICK | OTHERS)[name]
    ran = gpu.run(case.row, *case.flags, gpus=case.gpus)
    assert ran.done.code == 0, ran.done.err
    assert ran.done.summary["updates"] > 0
    assert not strangers(ran)
    assert not excess(ran, case)
    for gpu_number, learner in enumerate(sorted(ran.learners, key=lambda each: each["process"], reverse=True)):
        assert learner[f"launches_on_{gpu_number}"] > learner["launches"] / 2


@pytest.mark.slow
def test_a_successor_of_a_crashed_actor_gets_the_weights_on_the_gpu_again(gpu):
    """IPC handles go from the learner to each successor; they cannot be sent on."""
    ran = gpu.run(replace(A3C_DATA, env_id=CRASH), "--max-restarts", "9", "--total-steps", "600")
    assert ran.done.code == 0, ran.done.err
    restarts = ran.done.summary["worker_restarts"]
    assert restarts > 0
    assert 0 <= ran.learners[0]["handles_sent"] - 2 - restarts <= 2  # the last ones have not got so far


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, TASK], ids=str)
def test_a_killed_actor_is_replaced_on_the_gpu(gpu, scripts, chapter):
    trainer = gpu.start(chapter, "--max-restarts", "3", "--total-steps", "6000")
    scripts.wait_for_game(trainer)
    actors_of(trainer.pid)[0].kill()
    ran = gpu.finish(trainer)
    assert ran.done.code == 0, ran.done.err
    assert ran.done.summary["worker_restarts"] == 1
    assert not strangers(ran)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a3c_data", "a3c_grad", "apex_dqn"])
def test_memory_that_cannot_be_pinned_costs_one_warning_at_most(gpu, name):
    case = QUICK[name]
    ran = gpu.run(case.chapter, *case.flags, pin_error="2")
    assert ran.done.code == 0, ran.done.err
    warned = [process["process"] for process in ran.processes if "pins_refused" in process]
    assert (ran.done.out + ran.done.err).count("cannot be pinned (CUDA error 2)") == len(warned)
    assert warned == (["python"] if name == "a3c_data" else [])  # others have their slots on the GPU, or on the CPU


ON_CPU = {"a3c_data, images": PONG, "a3c_grad": "", "apex_dqn": "", "impala, lstm": "", "task, evaluated": ""}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a3c_grad" else pytest.mark.slow) for name in ON_CPU]
)
def test_actors_that_act_on_the_cpu_do_not_use_the_gpu(gpu, name):
    """Where processes cannot share its memory, also of images."""
    case, no_ipc = QUICK[name], "CUDA error: invalid resource handle"
    ran = gpu.run(case.row, *case.flags, "--act-on", "auto", ipc_error=no_ipc)
    assert ran.done.code == 0, ran.done.err
    assert ran.done.summary["updates"] > 0
    why = f"processes cannot share memory of the GPU: RuntimeError: {no_ipc}" if ON_CPU[name] else "a net for vectors"
    assert f"actors act on the CPU ({why}" in ran.done.out
    assert not ran.actors
    assert not strangers(ran)


@pytest.mark.slow
def test_memory_that_processes_cannot_share_is_refused_for_actors_on_the_gpu(gpu):
    ran = gpu.run(A3C_DATA, ipc_error="CUDA error: operation not supported")
    assert ran.done.code == 2
    assert "act-on=cuda: processes cannot share memory of the GPU: RuntimeError: CUDA error: op" in ran.done.err


NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"
WAITING_NET = """
import a3c_mp.nets.distributions
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.policy, self.value = nn.Linear(inputs, outputs), nn.Linear(inputs, 1)

    def forward(self, obs):
        if obs.abs().max() > 5:
            obs = obs.clamp(-5, 5)
        return self.policy(obs), self.value(obs).squeeze(-1)

def make(obs_space, action_space):
    return Net(obs_space.shape[0], a3c_mp.nets.distributions.num_outputs(action_space))
"""


def test_a_gpu_that_this_torch_has_no_kernels_for_is_refused_in_one_line(gpu):
    ran = gpu.run(A3C_DATA, kernel_error=NO_KERNEL, capability="7.0")
    assert ran.done.code == 2
    assert ran.done.err.count("\n") == 1
    assert "no kernel image is available for execution on the device; the GPU is sm_70, torch's build" in ran.done.err
    assert "needs driver 580 or newer, and has kernels for sm_75" in ran.done.err


@pytest.mark.slow
def test_a_net_that_waits_for_the_gpu_is_refused_unless_it_runs_without_a_graph(gpu, scripts):
    (scripts.runs_dir / "waiting.py").write_text(WAITING_NET)
    ran = gpu.run(A3C_DATA, "--net", "waiting:make")
    assert ran.done.code == 2
    assert ran.done.err.count("\n") == 1
    assert "net=waiting:make: actors launch it as a CUDA graph, which failed" in ran.done.err
    assert "--no-cuda-graph" in ran.done.err
    ran = gpu.run(A3C_DATA, *SHORT, "--net", "waiting:make", "--no-cuda-graph")
    assert ran.done.code == 0, ran.done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(POPULATION, (*GENERATION, *SMALL_NETS), PONG),
        Case(POPULATION_PPO, ("--total-steps", "800")),
        Case(POPULATION_PPO, ("--total-steps", "800", "--no-normalize-obs"), PENDULUM),
    ],
    ids=lambda case: f"{case.chapter.algorithm}-{case.env_id}",
)
def test_members_learn_on_the_gpu_of_their_place(gpu, case):
    ran = gpu.run(case.row, *case.flags, gpus=2)
    assert ran.done.code == 0, ran.done.err
    assert ran.done.summary["updates"] > 0
    used = [[member.get(f"launches_on_{number}", 0) for number in (0, 1)] for member in ran.role("worker")]
    assert sorted(each.index(max(each)) for each in used) == [0, 1], used
    assert all(min(each) <= 5 for each in used), "one GPU alone"
