"""Where nets live: torch's settings for a run, and what the GPU path needs beyond `.to(device)`."""

from __future__ import annotations

import torch

from a3c_mp.config import CommonArgs
from a3c_mp.nets.cuda_graph import make_deterministic
from a3c_mp.run.preflight import check_device


def set_up_torch(args: CommonArgs, rank: int = 0) -> torch.device:
    """Seed torch, give a learner its threads, and return the device of its nets. Raises ConfigError without CUDA."""
    device = check_device(args.cuda)
    if args.cuda and rank:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(args.learner_threads)
    torch.manual_seed(args.seed)
    if args.deterministic and args.cuda:  # the CPU computes the same bits anyway
        make_deterministic()
    return device
