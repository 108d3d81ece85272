"""A full disk and a small /dev/shm, both real: file systems of a few MiB, mounted in a namespace of their own.

Skipped where the kernel does not let a user make one.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import CARTPOLE, CHAPTERS, ROOT

from a3c_mp.checkpoint import list_checkpoints, load

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-euc"]
FULL_DISK = """
mkdir runs out && mount -t tmpfs -o size=4m tmpfs runs
"$@" > out/told 2>&1 & trainer=$!
until ls runs/r/checkpoints/step_*.json > out/found 2>&1; do sleep 0.1; kill -0 $trainer; done
cat /dev/zero > runs/filler 2> out/full || true
until grep -q 'no checkpoint at' out/told && grep -q 'TensorBoard cannot' out/told; do sleep 0.1; kill -0 $trainer; done
cp -r runs/r/checkpoints out/during
rm runs/filler
checkpoints() { ls runs/r/checkpoints/step_*.json; }
before=$(checkpoints)
until [ "$(checkpoints)" != "$before" ]; do sleep 0.1; kill -0 $trainer; done
kill -TERM $trainer
code=0; wait $trainer || code=$?
cp -r runs/r out/run
exit $code
"""
SMALL_SHM = """
mount -t tmpfs -o size=$1 tmpfs /dev/shm
shift
exec "$@"
"""


def namespaces():
    try:
        return subprocess.run([*NAMESPACE, "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not namespaces(), reason="no user namespaces here")


def in_namespace(script: str, folder: Path, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess:
    """Run a shell script that may mount what only it sees; all its processes are gone at the end."""
    process = subprocess.Popen(
        [*NAMESPACE, script, "bash", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", CHAPTERS)
def test_a_disk_that_is_full_for_a_while(algorithm, tmp_path):
    script, flags = CHAPTERS[algorithm]
    flags = [*CARTPOLE, *flags, "--checkpoint-seconds", "0.5", "--total-steps", "1e9", "--run-name", "r"]
    done = in_namespace(FULL_DISK, tmp_path, sys.executable, str(ROOT / script), *flags)
    told = (tmp_path / "out/told").read_text()
    assert done.returncode == 143, done.stderr + told
    assert "No space left on device" in told
    assert "Traceback" not in told
    (during, *_), (after, *_) = (list_checkpoints(tmp_path / "out" / name) for name in ("during", "run/checkpoints"))
    origin = {"algorithm": algorithm, "env_id": "CartPole-v1"}
    assert 0 < load(during, **origin)["steps"] < load(after, **origin)["steps"]
    assert json.loads((tmp_path / "out/run/summary.json").read_text())["exit_reason"] == "SIGTERM"


def test_a_dev_shm_as_small_as_dockers_is_told_before_anything_starts(tmp_path):
    """Pong's two slots fit into 64 MiB, and so do its weights, but not both."""
    script = str(ROOT / "train_a3c_data.py")
    done = in_namespace(SMALL_SHM, tmp_path, "64m", sys.executable, script, "--precision", "fp32")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "for the weights" in line
    assert "/dev/shm" in line
    assert not (tmp_path / "runs").exists()
