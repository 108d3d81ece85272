"""Where actors compute: on the GPU with weights in memory that they share with the learner, or each on the CPU."""

from typing import NamedTuple

import torch
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.nets.precision import acting_dtype


class Acting(NamedTuple):
    """Device and dtype of the nets of actors, and a line for the log about how weights reach them."""

    device: torch.device
    dtype: torch.dtype
    note: str = ""


def choose_acting(args: CommonArgs, net: nn.Module) -> Acting:
    """Choose where actors compute, for the learner's `net`, by `--act-on`.

    With `auto` that is the GPU for images only: a net for vectors takes less time on the CPU than a launch and the way
    back. Processes share memory of a GPU by CUDA IPC, which containers, WSL and MIG may not allow: a child tries it.
    Raises ConfigError for `--act-on cuda` where that is impossible; see also `check_capture`.
    """
    assert isinstance(net.norm, ObsNorm), net
    device, image = net.norm.shift.device, net.norm.has_images
    cpu = torch.device("cpu")
    why = "" if image or args.act_on == "cuda" else "a net for vectors is faster there"
    if device.type == "cpu":
        if args.act_on == "cuda":
            raise ConfigError("act-on", args.act_on, "the net is not on a GPU", "give --cuda too, or use auto")
        return Acting(cpu, acting_dtype(args.precision, net))
    if args.act_on != "cpu" and not why:
        from a3c_mp.run.gpu import check_capture, why_not_shared  # here, as most runs have no GPU

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
