"""Which number format nets compute in. Master weights, returns and losses are float32 always."""

from __future__ import annotations

import torch


def compute_dtype(precision: str, device: torch.device, image: bool) -> torch.dtype:
    """bfloat16 or float32, for `--precision {auto,fp32,bf16}`.

    `auto` takes bfloat16 for convolutional nets where the hardware multiplies it natively (AMX, AVX-512 BF16, CUDA
    capability 8.0 and newer). Small nets on vectors stay in float32: they are bound by call overhead. `fp32` leaves
    torch's own setting of TF32 as it is.
    """
    if precision == "auto":
        return torch.bfloat16 if image and has_native_bf16(device) else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def has_native_bf16(device: torch.device) -> bool:
    """Whether this device has bfloat16 matrix instructions; elsewhere it is emulated, and slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
