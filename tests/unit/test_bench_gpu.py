"""bench/gpu_check.py: its model, parts that fail or hang, what it reads of tests, traces and warnings."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from virtual_gpu import library
from virtual_gpu.conftest import START

from a3c_mp.errors import ConfigError
from bench import gpu_check
from bench.common import ROOT
from bench.gpu import alone, parts
from bench.gpu.queueing import predict_sps, throughput


def by_mean_values(thinking, demands, customers):
    """The throughput of `customers` that think for a while, then queue at each station, by mean value analysis."""
    queues = [0.0] * len(demands)
    for number in range(1, customers + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = number / (thinking + sum(waits))
        queues = [rate * wait for wait in waits]
    return rate


@pytest.mark.parametrize("customers", [1, 2, 15, 60])
@pytest.mark.parametrize("demands", [(7.0,), (7.0, 2.0), (0.1, 40.0)])
def test_the_throughput_of_a_closed_network_is_that_of_mean_value_analysis(customers, demands):
    found = throughput((300.0, *demands), (customers, *(1 for _ in demands)), customers)
    assert found == pytest.approx(by_mean_values(300.0, demands, customers))


def test_the_model_has_the_limits_of_actors_gpu_and_learner():
    run = {"unroll_length": 32, "num_envs": 16, "step_ms": 8.0, "act_ms": 1.0, "gpu_ms": 0.25, "learner_ms": 15.0}
    alone_ms = 32 * 9.0 + 15.0
    assert predict_sps(actors=1, cores=15, **run) == pytest.approx(1000 * 512 / alone_ms)
    assert predict_sps(actors=200, cores=200, **run) == pytest.approx(1000 * 512 / 15.0, rel=1e-3), "the learner"
    assert predict_sps(actors=200, cores=200, **run | {"gpu_ms": 1.0}) == pytest.approx(1000 * 16, rel=1e-3), "the GPU"
    few_cores = predict_sps(actors=200, cores=4, **run | {"learner_ms": 0.1, "gpu_ms": 0.0})
    assert few_cores == pytest.approx(4 * 1000 * 16 / 9.0, rel=1e-3), "the cores"
    assert predict_sps(actors=15, cores=15, slots_per_actor=2, **run) > predict_sps(actors=15, cores=15, **run)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^cuda=True: torch sees no GPU that it can use; see nvidia-smi"):
        gpu_check.main()


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Runs a script as a part: a function (code, limit) -> (result, how long it took)."""
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "SCRIPT", script := tmp_path / "part.py")

    def run(code, limit=20.0):
        script.write_text(f"import os, subprocess, sys, time\nfrom pathlib import Path\n{code}")
        return gpu_check.run_part("speed", {"seconds": 1}, limit)

    return run


WRITE = 'Path(sys.argv[2], "speed.json").write_text(\'{"sps": NaN, "pid": %d}\' % child.pid)'
CHILD = "child = subprocess.Popen(['sleep', '60'], process_group=0)"


def test_a_part_that_fails_or_hangs_keeps_its_figures_and_leaves_no_process(part):
    failed = part(f"{CHILD}\n{WRITE}\nprint('why')\nsys.exit(3)")
    assert (failed["error"], failed["figures"]["sps"], failed["output"]) == ("ended with code 3", None, "why\n")
    started = time.monotonic()
    hung = part(f"{CHILD}\n{WRITE}\ntime.sleep(60)", limit=2.0)
    assert time.monotonic() - started < 30
    assert hung["error"] == "cut off after 2 s"
    for child in (failed["figures"]["pid"], hung["figures"]["pid"]):
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert part("", limit=0.1)["error"] == "skipped: no time is left"
    done = part('Path(sys.argv[2], "speed.json").write_text((Path(sys.argv[2], "task.json")).read_text())')
    assert (done["error"], done["figures"]) == (None, {"seconds": 1, "limit": 20.0})
    rows = [{"row": "speed", **each} for each in (failed, hung, done)]
    assert "cut off after 2 s" in gpu_check.table({"runs": rows})


@pytest.mark.parametrize("prefix", ["", "[gw1] [ 50%] "], ids=["alone", "xdist"])
def test_results_of_tests_are_read_while_they_run(prefix):
    names = [("tests/a.py::test_x[a b]", "PASSED"), ("tests/a.py::test_y", "FAILED"), ("tests/b.py::test_z", "SKIPPED")]
    lines = [f"{prefix}{result} {name}" if prefix else f"{name} {result}   [ 30%]" for name, result in names]
    summary = ["FAILED tests/a.py::test_y - assert 1 == 2", "1 failed, 1 passed, 1 skipped in 3.0s"]
    for output in (lines, lines + summary):
        found = parts.results_of("\n".join(output))
        assert [found[name] for name in ("passed", "failed", "skipped", "error")] == [1, 1, 1, 0]
        assert found["names_failed"] == ["tests/a.py::test_y"]


def test_kernels_and_calls_of_an_update_are_counted_in_a_trace():
    kernel, copy = {"cat": "kernel", "dur": 20.0}, {"cat": "gpu_memcpy", "dur": 5}
    launch, graph = ({"cat": "cuda_runtime", "name": name} for name in ("cudaLaunchKernel", "cudaGraphLaunch"))
    events = [*[kernel] * 60, *[copy] * 4, *[launch] * 40, *[graph] * 2, {"ph": "M"}, {"cat": "gpu_user_annotation"}]

    class Profiler:
        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": events}))

    found = alone.counted(Profiler(), updates=2)
    assert (found["kernels_per_update"], found["kernel_ms_per_update"]) == (30, 0.6)
    assert (found["gpu_memcpys_per_update"], found["gpu_memsets_per_update"]) == (2, 0)
    assert found["calls_per_update"] == {"cudaLaunchKernel": 20, "cudaGraphLaunch": 1}


TORCH = """
class cuda:
    class CUDAGraph:
        def replay(self): print("replayed")
    _lazy_call = staticmethod(lambda function: function())
class _C:
    _cuda_set_sync_debug_mode = staticmethod(lambda mode: print("mode", mode))
"""
WAITING = """
import logging, sys, warnings
sys.path.insert(0, {root!r})
import torch
logging.captureWarnings(True)
scope = {{"warnings": warnings}}
exec(compile("def wait(): warnings.warn('called a synchronizing CUDA operation (...)')", {file!r}, "exec"), scope)
scope["wait"](), scope["wait"](), torch.cuda.CUDAGraph().replay()
"""


def test_warnings_of_waits_are_counted_by_function(tmp_path):
    """Also those that go to the log, and where another sitecustomize would have been found."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "sitecustomize.py").write_text("print('another one')")
    file = str(ROOT / "a3c_mp" / "nets" / "precision.py")
    program = [sys.executable, "-c", WAITING.format(root=str(tmp_path), file=file)]
    path = os.pathsep.join([str(ROOT / "bench" / "gpu" / "start"), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": path, "GPU_WAITS": str(tmp_path)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["another one", "mode 1", "replayed", ""]
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (found["waits_by"], found["replays"]) == ({"precision.wait": 2}, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_check_runs_on_the_virtual_gpu(tmp_path):
    if why := library.missing():
        pytest.skip(why)
    library.built()
    names = ["launches", "latency", "waits", "speed", "kill", "learners"]
    flags = ["--num-actors=2", "--num-envs=8", "--seconds=6", f"--runs-dir={tmp_path}", f"--out={tmp_path / 'r.json'}"]
    env = {**os.environ, "PYTHONPATH": str(START), "VIRTUAL_GPUS": "2"}
    subprocess.run([sys.executable, str(ROOT / "bench/gpu_check.py"), "--parts", *names, *flags], env=env, check=True)
    found = {run["row"]: run for run in json.loads((tmp_path / "r.json").read_text())["runs"]}
    assert [*found] == names
    assert not any(run["error"] for run in found.values())
    figures = {name: run["figures"] for name, run in found.items()}
    assert all(each["ms_per_update"] > 0 for each in figures["launches"].values())
    assert all(figures["latency"][what]["2"]["mean_ms"] > 0 for what in ("cuda", "cpu", "step"))
    assert all("actors" in each for each in figures["waits"].values())
    assert all(each["sps"] > 0 for each in figures["speed"].values())
    assert figures["speed"]["a3c_data act-on=cuda"]["predicted_sps"] > 0
    assert (figures["kill"]["goes_on"], figures["learners"]["resumed_exit_code"]) == (True, 0)
