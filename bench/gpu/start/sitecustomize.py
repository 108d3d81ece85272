"""With this folder in PYTHONPATH, each Python process counts its waits for the GPU into the folder `GPU_WAITS`.

A wait is what torch warns of with `torch.cuda.set_sync_debug_mode("warn")`. It counts for the innermost function of the
project, as on the virtual GPU of the tests. Python imports a module of this name at its start.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parents[2])
WARNING = "called a synchronizing CUDA operation"
NOT_COUNTED = "/.venv/", "/virtual_gpu/", "/bench/gpu/"
EVERY_SECONDS = 0.5  # processes may be killed: what is counted is written now and then
COUNTS: Counter[str] = Counter()
"""launches of CUDA graphs"""
WAITS: Counter[str] = Counter()
"""waits by `module.function`; autograd's threads have none"""
last = 0.0


def caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and not any(part in path for part in NOT_COUNTED):
            return f"{Path(path).stem}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def save() -> None:
    global last
    last = time.monotonic()
    with suppress(Exception):  # another thread counts, the disk is full: the process goes on
        name = Path("/proc/self/comm").read_text().strip()
        found = {"process": name, "waits_by": dict(WAITS), **COUNTS}
        path = Path(os.environ["GPU_WAITS"], f"{os.getpid()}.json")
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").replace(path)


def count() -> None:
    WAITS[caller()] += 1
    if time.monotonic() - last > EVERY_SECONDS:
        save()


def install(torch) -> None:
    """Count the waits of this process from the first use of the GPU on."""
    show, replay = warnings._showwarnmsg, torch.cuda.CUDAGraph.replay  # type: ignore[attr-defined]

    def counted_warning(warning):
        if WARNING in str(warning.message):
            count()
        else:
            show(warning)

    def counted_replay(graph) -> None:
        COUNTS["replays"] += 1
        replay(graph)

    warnings._showwarnmsg = counted_warning  # type: ignore[attr-defined]  # `showwarning` becomes the log's
    warnings.filterwarnings("always", message=WARNING)
    torch.cuda.CUDAGraph.replay = counted_replay
    # Once this process opens the GPU: to set it at once would open it, also in processes that never use it.
    if hasattr(torch._C, "_cuda_set_sync_debug_mode"):  # not the virtual GPU
        torch.cuda._lazy_call(lambda: torch._C._cuda_set_sync_debug_mode(1))
    atexit.register(save)


class TorchFinder(importlib.abc.MetaPathFinder):
    """Loads torch as usual, then installs the counter."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if (spec := importlib.util.find_spec(name)) is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


others = [path for path in sys.path if Path(path).resolve() != HERE]
if shadowed := importlib.machinery.PathFinder.find_spec("sitecustomize", others):  # another one would have been found
    shadowed.loader.exec_module(importlib.util.module_from_spec(shadowed))  # type: ignore[union-attr]
if "GPU_WAITS" in os.environ:
    sys.meta_path.insert(0, TorchFinder())
