"""Where actors compute, and checks before a run with `--cuda`: it runs kernels, shares memory, captures the net."""

import os
import pickle
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError, describe, one_line
from a3c_mp.nets.precision import acting_dtype, acting_forward
from a3c_mp.processes.spawn import remove_at_end, start_child
from a3c_mp.run.learner import Acting

OPEN_SECONDS = 60.0  # longest time of a child that loads torch and opens a handle


def open_gpu(rank: int) -> torch.device:
    """Make the GPU of a learner the current one, launch a kernel there, and return its device.

    Raises ConfigError, which names driver and architectures that torch's build needs, if that fails.
    """
    version, leave = torch.version.cuda, "leave --cuda out (resumed: give --no-cuda)"
    if version is None:
        raise ConfigError("cuda", True, "this torch has no CUDA", f"{leave}, or install a CUDA build of torch")
    driver = {"12": 525, "13": 580}.get(version.split(".")[0])  # docs.nvidia.com/deploy/cuda-compatibility
    needs = f"CUDA {version}" + (f", which needs driver {driver} or newer" if driver else "")
    fix = f"{leave}, or see nvidia-smi and docs/gpu.md"
    if not torch.cuda.is_available():
        raise ConfigError("cuda", True, f"torch sees no GPU that it can use; its build is for {needs}", fix)
    device = torch.device("cuda", rank) if rank else torch.device("cuda")
    try:
        torch.cuda.set_device(rank)
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:  # without kernels for this GPU, or it is lost, full or reserved
        why = cause_of(error)
        with suppress(RuntimeError):
            gpu = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
            arches = " ".join(torch.cuda.get_arch_list())
            why += f"; the GPU is {gpu}, torch's build is for {needs}, and has kernels for {arches}"
        raise ConfigError("cuda", True, why, fix) from error
    return device


def choose_acting(args: CommonArgs, net: Any) -> Acting:
    """Choose where actors compute, for the learner's `net`, by `--act-on`.

    With `auto` that is the GPU for images only: a net for vectors takes less time on the CPU than a launch and the way
    back. Processes share memory of a GPU by CUDA IPC, which containers, WSL and MIG may not allow: a child tries it.
    Raises ConfigError for `--act-on cuda` where that is impossible; see also `check_capture`.
    """
    device, image = net.norm.shift.device, net.norm.has_images
    cpu = torch.device("cpu")
    why = "" if image or args.act_on == "cuda" else "a net for vectors is faster there"
    if device.type == "cpu":
        if args.act_on == "cuda":
            raise ConfigError("act-on", args.act_on, "the net is not on a GPU", "give --cuda too, or use auto")
        return Acting(cpu, acting_dtype(args.precision, net))
    if args.act_on != "cpu" and not why:
        is_alone = vars(args).get("standalone", False)
        if not (why := "" if is_alone else why_not_shared(device)):
            check_capture(args, net)
            how = "" if is_alone else ", with the learner's weights in shared GPU memory (CUDA IPC)"
            return Acting(device, acting_dtype(args.precision, net), f"actors act on {device}{how}")
        why = f"processes cannot share memory of the GPU: {why}"
        if args.act_on == "cuda":
            raise ConfigError("act-on", args.act_on, why, "use auto or cpu")
    note = f"actors act on the CPU ({why or '--act-on cpu'}); weights and what actors send pass through pinned memory"
    return Acting(cpu, acting_dtype(args.precision, net, cpu), note)


def check_capture(args: Any, net: Any) -> None:
    """Raise ConfigError if the forward pass of a net of the user's own cannot be captured as a CUDA graph.

    What the host waits for cannot be in one.
    """
    if ":" not in getattr(args, "net", "") or not args.cuda_graph:
        return
    dtype = torch.uint8 if net.norm.image else torch.float32
    obs = torch.zeros(args.num_envs, *net.norm.shift.shape[1:], dtype=dtype)
    try:
        with torch.inference_mode():
            net(obs.to(net.norm.shift.device))
    except Exception as error:  # of the user's, that only a GPU shows: a tensor that has stayed on the CPU, say
        raise ConfigError("net", args.net, describe(error), "correct it, or train without --cuda") from error
    try:
        acting_forward(args, net, obs)
    except RuntimeError as error:
        why = f"actors launch it as a CUDA graph, which failed ({cause_of(error)})"
        fix = "leave out what waits for the GPU (item, cpu, a tensor in an if, masks as indices)"
        raise ConfigError("net", args.net, why, f"{fix}, or give --no-cuda-graph") from error


def cause_of(error: BaseException) -> str:
    """The first of the errors that led to this one, as the end of a capture fails too; without torch's advice."""
    while error.__context__ is not None:
        error = error.__context__
    return one_line(error).partition(" CUDA kernel errors")[0]


def why_not_shared(device: torch.device) -> str:
    """Why no child process can open memory of a GPU that this one has allocated; "" if one can."""
    tensor = torch.full((1,), 7.0, device=device)
    ours, theirs = get_context("spawn").Pipe(duplex=False)
    with ours, theirs:
        try:
            child = start_child(_open, (bytes(ForkingPickler.dumps(tensor)), theirs), name="ipc-check", daemon=True)
        except (OSError, RuntimeError) as error:  # the memory has no handle, or the machine allows no further process
            return one_line(error)
        for name in (f"torch_{os.getpid()}_*", f"cuda.shm.{os.getuid():x}.{os.getpid():x}.*"):
            remove_at_end(Path("/dev/shm", name))  # in which torch and the driver count who shares; they leave them
        theirs.close()  # else its end would go unnoticed
        try:
            return ours.recv() if ours.poll(OPEN_SECONDS) else f"no answer after {OPEN_SECONDS:g} s"
        except EOFError:
            child.join()
            return f"a process that opened it ended with code {child.exitcode}"
        finally:
            child.kill()
            child.join()


def _open(handle: bytes, pipe: Connection) -> None:
    try:
        value = pickle.loads(handle).item()
        why = "" if value == 7.0 else f"it reads as {value}, not as 7"
    except Exception as error:
        why = one_line(error)
    with suppress(OSError):
        pipe.send(why)
    os._exit(0)
