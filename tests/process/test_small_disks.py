"""A full disk and a /dev/shm that takes nothing, both real: file systems mounted in a namespace of their own.

Skipped where the kernel does not let a user make one.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import A3C_DATA, APEX_DQN, EVERY_CHAPTER, IMPALA, RAY_IMPALA, ROOT, TASK, left_in_shm, row_id

from a3c_mp.run.checkpoint import list_checkpoints, load

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-euc"]
FULL_DISK = """
mkdir runs out && mount -t tmpfs -o size=4m tmpfs runs
"$@" > out/told 2>&1 & trainer=$!
until ls runs/r/checkpoints/step_*.json > out/found 2>&1; do sleep 0.1; kill -0 $trainer; done
cat /dev/zero > runs/filler 2> out/full || true
until grep -q 'not written to' out/told && grep -q 'TensorBoard cannot' out/told; do sleep 0.1; kill -0 $trainer; done
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
READ_ONLY_SHM = """
mount -t tmpfs -o ro,size=4k,nr_inodes=1 tmpfs /dev/shm
exec "$@"
"""
NO_SHM = """
export TMPDIR=$PWD/a/path/of/folders/with/long/names/which/some/schedulers/make/for/each/of/their/jobs
mkdir -p dev $TMPDIR && mount -t tmpfs tmpfs dev
for name in null zero random urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount --rbind dev /dev
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
@EVERY_CHAPTER
def test_a_disk_that_is_full_for_a_while(chapter, tmp_path):
    flags = [*chapter.flags, "--checkpoint-seconds", "0.5", "--total-steps", "1e9", "--run-name", "r"]
    done = in_namespace(FULL_DISK, tmp_path, sys.executable, str(ROOT / chapter.script), *flags)
    told = (tmp_path / "out/told").read_text()
    assert done.returncode == 143, done.stderr + told
    assert "No space left on device" in told
    assert "Traceback" not in told
    (during, *_), (after, *_) = (list_checkpoints(tmp_path / "out" / name) for name in ("during", "run/checkpoints"))
    origin = {"algorithm": chapter.algorithm, "env_id": chapter.env_id}
    assert 0 < load(during, **origin)["steps"] < load(after, **origin)["steps"]
    assert json.loads((tmp_path / "out/run/summary.json").read_text())["exit_reason"] == "SIGTERM"


@pytest.mark.parametrize(
    "chapter",
    [APEX_DQN, *(pytest.param(c, marks=pytest.mark.slow) for c in (A3C_DATA, IMPALA, TASK, RAY_IMPALA))],
    ids=row_id,
)
def test_a_dev_shm_that_takes_nothing_is_not_needed(chapter, tmp_path):
    work = chapter.two_learners if chapter is IMPALA else ["--num-actors", "1"]
    flags = [
        *chapter.flags,
        *work,
        *("--total-steps", "500", "--run-name", "r"),
        *("--eval-every", "400", "--eval-episodes", "1"),
    ]
    done = in_namespace(READ_ONLY_SHM, tmp_path, sys.executable, str(ROOT / chapter.script), *flags)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((tmp_path / "runs/r/summary.json").read_text())
    assert (summary["worker_restarts"], summary["evaluator_restarts"]) == (0, 0)
    assert summary["eval_count"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [TASK, RAY_IMPALA], ids=row_id)
def test_without_dev_shm_and_where_paths_of_temporary_files_are_too_long_for_sockets(chapter, tmp_path):
    flags = [*chapter.flags, "--total-steps", "500", "--run-name", "r"]
    done = in_namespace(NO_SHM, tmp_path, sys.executable, str(ROOT / chapter.script), *flags)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("chapter", [APEX_DQN, pytest.param(A3C_DATA, marks=pytest.mark.slow)], ids=row_id)
def test_a_limit_of_file_sizes_is_one_line_before_anything_starts(chapter, tmp_path):
    """`ulimit -f` counts in KiB in bash; Pong's replay takes more, and so do its slots."""
    before = set(Path("/dev/shm").iterdir())
    done = in_namespace('ulimit -f 1024; exec "$@"', tmp_path, sys.executable, str(ROOT / chapter.script))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "MiB of shared memory cannot be allocated (File too large; ulimit -f" in line
    assert line.startswith("error: replay-size=") == (chapter is APEX_DQN)
    assert not (tmp_path / "runs").exists()
    assert not left_in_shm(before)
