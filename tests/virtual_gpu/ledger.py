"""What this process did on the virtual GPU: launches, copies and waits by function, and the copies under way.

A wait is whatever makes the host wait for the GPU. Every wait completes all copies: the virtual GPU has one stream.
"""

import atexit
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

COUNTS: Counter[str] = Counter()
"""launches, waits, copies, replays, handles sent, ..."""
BY_FUNCTION: dict[str, Counter[str]] = {"launches": Counter(), "waits": Counter()}
"""launches and waits by the innermost function of the project, `module.function`; autograd's threads have none"""
ROOT = os.environ.get("VIRTUAL_GPU_ROOT", str(Path(__file__).resolve().parents[2]))
"""folder of the code that launches and waits are counted for"""
capturing: list = []
"""the graph that is captured"""
_lock = threading.RLock()
_uploads: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # pinned source, its values at the copy, who copied
_downloads: list[tuple[torch.Tensor, torch.Tensor]] = []  # pinned destination, what it will hold


class Overwritten(RuntimeError):
    """Pinned memory was written while a copy from it may have been under way."""


def captured_here() -> Any:
    """The graph that this thread's work is captured in; None: it is done.

    Backward passes have threads of their own, of which Python knows nothing: they are those of the capture.
    """
    for graph in capturing:
        here = threading.current_thread()
        if graph.thread in (None, here) or isinstance(here, threading._DummyThread):  # type: ignore[attr-defined]
            return graph
    return None


def caller() -> str:
    """The innermost function of the project on this thread's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and "/.venv/" not in path and "/virtual_gpu/" not in path:
            return f"{Path(path).stem}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "autograd"


def launch(device: int) -> None:
    """Count the launch of a kernel, or in a capture a node of its graph."""
    if captured_here():
        COUNTS["captured"] += 1
        return
    COUNTS["launches"] += 1
    COUNTS[f"launches_on_{device}"] += 1
    BY_FUNCTION["launches"][caller()] += 1


def wait(why: str) -> None:
    """The host waits for the GPU: all copies are done. Raises RuntimeError in a capture."""
    if captured_here():
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({why})")
    COUNTS["waits"] += 1
    BY_FUNCTION["waits"][caller()] += 1
    with _lock:
        uploads, downloads = _uploads[:], _downloads[:]
        _uploads.clear()
        _downloads.clear()
    for destination, values in downloads:
        destination.copy_(values)
    for source, values, who in uploads:
        if not torch.equal(_bytes(source), _bytes(values)):
            raise Overwritten(f"pinned memory that {who} copies from was written before a wait ({why}, {caller()})")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)  # NaN equals itself


def upload(source: torch.Tensor, non_blocking: bool, is_pinned: bool) -> None:
    """Count a copy of host memory to the GPU."""
    COUNTS["uploads"] += 1
    COUNTS["uploaded_bytes"] += source.nbytes
    if captured_here() and not is_pinned:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (copy of pageable memory)")
    if not non_blocking:
        wait("copy to the GPU")
    elif is_pinned and source.numel():
        with _lock:
            _uploads.append((source, source.clone(), caller()))
    else:
        COUNTS["staged"] += 1  # the host copies pageable memory first, and goes on


def download(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool, is_pinned: bool) -> None:
    """Copy the GPU's memory to the host's; what an asynchronous copy brings is there after the next wait."""
    COUNTS["downloads"] += 1
    COUNTS["downloaded_bytes"] += source.nbytes
    if non_blocking and is_pinned and destination.numel():
        values = torch.empty_like(destination).copy_(source)
        destination.view(-1).view(torch.uint8).fill_(0x5A)
        with _lock:
            _downloads.append((destination, values))
    else:
        wait("copy from the GPU")
        destination.copy_(source)


def copies_under_way() -> bool:
    return bool(_uploads)


def report() -> None:
    """Append what was counted to the file `VIRTUAL_GPU_LOG`, a line of JSON; nothing if the GPU was not used."""
    path = os.environ.get("VIRTUAL_GPU_LOG")
    if path and COUNTS:
        line = {"process": Path("/proc/self/comm").read_text().strip(), "pid": os.getpid(), **COUNTS}
        line |= {f"{what}_by": dict(found) for what, found in BY_FUNCTION.items()}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        COUNTS.clear()


def report_at_the_end() -> None:
    """Have this process report however it ends, short of a kill from outside."""
    atexit.register(report)
    kill, leave = os.kill, os._exit

    def report_and_kill(pid: int, signum: int) -> None:
        if pid == os.getpid() and signum:
            report()
        kill(pid, signum)

    def report_and_leave(code: int) -> None:
        report()
        leave(code)

    os.kill, os._exit = report_and_kill, report_and_leave
