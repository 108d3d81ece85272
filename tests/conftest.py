"""Fixtures of all tests."""

import signal

import pytest
from support import Scripts

import a3c_mp  # noqa: F401 - sets OMP_NUM_THREADS, which counts only before torch is imported


@pytest.fixture
def scripts(tmp_path):
    scripts = Scripts(tmp_path)
    yield scripts
    for process in scripts.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
