"""Faults put into a copy of the code, each of which the virtual GPU finds; README.md has the same table."""

from dataclasses import dataclass, replace

import pytest

from virtual_gpu.test_gpu_chapters import QUICK, Case, excess, strangers


@dataclass(frozen=True)
class Fault:
    """A change of the code, and how a run with it shows that it is wrong."""

    case: Case
    file: str
    old: str
    new: str
    found: str
    """in the output of the run that fails; or what exceeds a budget"""


DATA, GRAD, DQN, LSTM = (QUICK[name] for name in ("a3c_data", "a3c_grad", "apex_dqn", "impala, lstm"))
EVALUATED, TWO = QUICK["task, evaluated"], replace(LSTM, flags=("--total-steps", "500", "--num-learners", "2"), gpus=2)
NORM, PRECISION = "a3c_mp/nets/obs_norm.py", "a3c_mp/nets/precision.py"
TWO_DEVICES = "Expected all tensors to be on the same device, but found cpu and cuda:0"
IN_CAPTURE = "operation not permitted when stream is capturing"
ACTION, NORMALIZED = "launch().cpu()", "obs = (obs - shift).mul_(scale)"
RECORD, TO_GPU, ATTACH = (
    "self.learner.record_update({})",
    "value_targets).to(channel.memory.weights.device)",
    "channel.memory = memory",
)
DRAW = "for batch in (*self._free, self._held):"
FAULTS = {
    "a generator on the CPU": Fault(
        LSTM, "a3c_mp/algorithms/impala.py", "(num_unrolls,), generator=rng)",
        "(num_unrolls,), generator=rng, device=self.unrolls.action.device)", "Expected a 'cuda' device type for gener",
    ),
    "a target net left on the CPU": Fault(
        DQN, "a3c_mp/algorithms/apex.py", "copy.deepcopy(net)", "copy.deepcopy(net).cpu()", TWO_DEVICES
    ),
    "indices drawn on the CPU": Fault(
        LSTM, "a3c_mp/algorithms/impala.py", "select(source, to_device(columns, device))", "select(source, columns)",
        TWO_DEVICES,
    ),
    "a GPU's tensor as an array": Fault(
        DQN, PRECISION, ACTION, "launch()", "can't convert cuda:0 device type tensor to numpy"
    ),
    "item() in a capture": Fault(
        DATA, NORM, NORMALIZED, f"{NORMALIZED}; assert obs.sum().item() < 1e9", f"{IN_CAPTURE} (item)"
    ),
    "a copy of pageable memory in a capture": Fault(
        DATA, NORM, NORMALIZED, f"{NORMALIZED} * shift.new_tensor(1.0)", f"{IN_CAPTURE} (copy of pageable memory)"
    ),
    "pinned memory written while it is copied": Fault(
        GRAD, "train_a3c_grad.py", TO_GPU, f"{TO_GPU}; outbox.rollout.action.add_(1)", "Overwritten: pinned memory that"
    ),
    "a batch given back while it is copied": Fault(
        DQN, "a3c_mp/replay/replay.py", DRAW, "for batch in self._free or [self._batches[-1].result()]:",
        "Overwritten: pinned memory that",
    ),
    "an action read before its copy is done": Fault(
        DATA, PRECISION, ACTION, 'launch().to("cpu", non_blocking=True)', "actor 0"
    ),
    "a handle sent on by its receiver": Fault(
        DATA, "a3c_mp/data/actor.py", f"    {ATTACH}\n    fill = ",
        f"    {ATTACH}\n    from multiprocessing.reduction import ForkingPickler as P; P.dumps(memory)\n    fill = ",
        "Attempted to send CUDA tensor received from another process",
    ),
    "both learners on one GPU": Fault(
        TWO, "a3c_mp/run/gpu.py", 'torch.device("cuda", rank)', 'torch.device("cuda", 0)', "learner-1 on 0"
    ),
    "a process without a GPU's role that opens one": Fault(
        EVALUATED, "a3c_mp/algorithms/roles.py", '"args": (None,)', '"args": (learner.memory,)', "evaluator used"
    ),
    "weights published before they are written": Fault(
        DATA, "a3c_mp/processes/weights.py", "if self.buffers.is_cuda:", "if False:", "published without a wait"
    ),
    "a wait more for each step": Fault(
        DATA, PRECISION, ACTION, "(torch.cuda.synchronize() or launch().cpu())", "waits in precision.acting_forward"
    ),
    "a wait more for each update": Fault(
        DATA, "a3c_mp/run/graph_step.py", RECORD, f"torch.cuda.synchronize(); {RECORD}", "waits in graph_step"
    ),
    "an optimizer of many launches": Fault(
        DATA, "a3c_mp/algorithms/actor_critic.py", "eps=args.adam_eps, fused=True", "eps=args.adam_eps, foreach=False",
        " launches (",
    ),
}  # fmt: skip
FAST = ("item() in a capture",)


def found_in(ran, case):
    """All that shows a fault: the output, processes that should not use the GPU, what exceeds budgets."""
    devices = [f"{each['process']} on {gpu}" for each in ran.learners for gpu in (0, 1) if f"launches_on_{gpu}" in each]
    ended = excess(ran, case) if ran.done.code == 0 else []
    others = [f"{process} used the GPU" for process in strangers(ran)]
    return "\n".join([ran.done.out, ran.done.err, *devices, *others, *ended])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_found(gpu, checkout, name):
    fault = FAULTS[name]
    root = checkout(fault.file, fault.old, fault.new)
    ran = gpu.run(fault.case.row, *fault.case.flags, root=root, gpus=fault.case.gpus)
    found = found_in(ran, fault.case)
    assert fault.found in found, found
