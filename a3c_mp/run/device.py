"""Torch's settings for a run, and the device of its nets."""

from __future__ import annotations

import torch

from a3c_mp.config import CommonArgs
from a3c_mp.nets.cuda_graph import make_deterministic
from a3c_mp.run.preflight import check_device


def set_up_torch(args: CommonArgs, rank: int = 0) -> torch.device:
    """Seed torch, set its threads and determinism, and return the device of a learner's nets.

    Args:
        args: the chapter's settings.
        rank: of the learner; with `--cuda` it uses the GPU of that number.

    Raises:
        ConfigError: `--cuda` without a CUDA device.
    """
    device = check_device(args.cuda)
    if args.cuda and rank:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(args.learner_threads)
    torch.manual_seed(args.seed)
    if args.deterministic and args.cuda:  # on the CPU results are deterministic anyway
        make_deterministic()
    return device
