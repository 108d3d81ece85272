"""Which number format is chosen for which net on which hardware."""

from itertools import product

import pytest
import torch

from a3c_mp.nets import precision
from a3c_mp.nets.precision import compute_dtype


@pytest.mark.parametrize(("flag", "native", "image"), product(["fp32", "bf16", "auto"], [True, False], [True, False]))
def test_bfloat16_is_for_images_where_it_is_asked_for_or_the_hardware_multiplies_it(flag, native, image, monkeypatch):
    monkeypatch.setattr(precision, "has_native_bf16", lambda device: native)
    found = compute_dtype(flag, torch.device("cpu"), image)
    assert found == (torch.bfloat16 if image and (flag == "bf16" or (flag == "auto" and native)) else torch.float32)


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_cpu_has_bfloat16_with_either_instruction_set(avx512, amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert precision.has_native_bf16(torch.device("cpu")) == (avx512 or amx)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_bfloat16_from_capability_8_on(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.has_native_bf16(torch.device("cuda")) == expected
