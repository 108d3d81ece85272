"""Which number format is chosen for which net on which hardware."""

import pytest
import torch

from a3c_mp.nets import precision
from a3c_mp.nets.precision import compute_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("image", [True, False])
def test_a_named_precision_is_taken_whatever_the_hardware(native, image, monkeypatch):
    monkeypatch.setattr(precision, "has_native_bf16", lambda device: native)
    assert compute_dtype("fp32", CPU, image) == torch.float32
    assert compute_dtype("bf16", CPU, image) == (torch.bfloat16 if image else torch.float32), "vectors need the bits"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("image", [True, False])
def test_auto_takes_bfloat16_for_images_where_the_hardware_multiplies_it(native, image, monkeypatch):
    monkeypatch.setattr(precision, "has_native_bf16", lambda device: native)
    assert (compute_dtype("auto", CPU, image) == torch.bfloat16) == (native and image)
    assert compute_dtype("auto", CPU, image) in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_cpu_has_bfloat16_with_either_instruction_set(avx512, amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert precision.has_native_bf16(CPU) == (avx512 or amx)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_bfloat16_from_capability_8_on(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.has_native_bf16(torch.device("cuda")) == expected
