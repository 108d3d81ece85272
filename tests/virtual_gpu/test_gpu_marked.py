"""The tests marked `cuda`, which skip where there is no GPU, on a virtual one."""

import os
import subprocess
import sys

import pytest
from harness import CHAPTERS, ROOT

from virtual_gpu import library
from virtual_gpu.conftest import START

PARTS = {name: f"(-{name}] or [{name}])" for name in map(str, CHAPTERS)}
PARTS |= {"others": " and ".join(f"not {part}" for part in PARTS.values())}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_the_tests_of_cuda_pass(part):
    if why := library.missing():
        pytest.skip(why)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", "-k", PARTS[part]]
    env = {**os.environ, "PYTHONPATH": str(START)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
