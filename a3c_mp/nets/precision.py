"""Mixed precision: nets compute in bfloat16 or float32. Master weights, returns and losses are always float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from a3c_mp.nets.obs_norm import ObsNorm


def compute_dtype(precision: str, device: torch.device, image: bool) -> torch.dtype:
    """Return bfloat16 or float32, for `--precision {auto,fp32,bf16}`.

    bfloat16 is for nets on images. Vectors stay in float32: a bfloat16 has 8 bits, enough for a pixel, but not for a
    position far from 0, and small nets are bound by call overhead. `auto` uses it where the hardware supports it
    natively (AMX, AVX-512 BF16, CUDA capability 8.0 and newer). `fp32` leaves torch's own setting of TF32 as it is.
    """
    assert precision in ("auto", "fp32", "bf16"), precision
    bf16 = precision == "bf16" or (precision == "auto" and has_native_bf16(device))
    return torch.bfloat16 if image and bf16 else torch.float32


def acting_dtype(precision: str, net: nn.Module) -> torch.dtype:
    """Return the `compute_dtype` of a net with an `ObsNorm` as `net.norm`; actors hold their weights in it."""
    assert isinstance(net.norm, ObsNorm), net
    return compute_dtype(precision, net.norm.shift.device, net.norm.image)


def autocast(precision: str, net: nn.Module) -> AbstractContextManager:
    """Return a context in which the learner's net, whose weights stay float32, computes in `acting_dtype`."""
    dtype = acting_dtype(precision, net)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(next(net.parameters()).device.type, dtype)


def has_native_bf16(device: torch.device) -> bool:
    """Whether this device has bfloat16 matrix instructions; elsewhere it is emulated, and slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
