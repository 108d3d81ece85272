"""What must happen before torch is imported; `import a3c_mp` runs it.

Parallelism here comes from processes; threads inside them would fight over the same cores. OpenMP reads its thread
count once, when it loads, so it is set here, in the environment that every spawned process inherits. The learner asks
torch for its `--learner-threads` explicitly.

Memory that a process has freed stays with it. By default the C library gives every large block back to the kernel at
once and asks for it again, zeroed page by page, at the next gradient step: a fifth of the learner's time on a CPU.

A spawned process must not outlive its parent, not even while it imports torch: the chapters import this package first.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
PR_SET_PDEATHSIG = 1  # of prctl(2)

PARENT_VARIABLE = "A3C_MP_PARENT_PID"
"""environment variable by which `spawn.start_child` tells a child whose it is before anything is imported"""

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; what --deterministic needs there

IGNORED_AT_START = frozenset(s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN)
"""signals that are ignored from the start, as nohup does with SIGHUP; environments may ignore more of them later"""


def open_standard_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, lest the next file opened gets its number.

    Text that a stream cannot encode is written with backslashes instead of raising.
    """
    for fd, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number, fd
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
            setattr(sys, f"__{name}__", getattr(sys, name))
        if mode == "w":
            with suppress(AttributeError, ValueError):  # replaced by something without encoding
                getattr(sys, name).reconfigure(errors="backslashreplace")


open_standard_streams()

with suppress(OSError, AttributeError):  # a C library other than glibc
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions refuse more than 32 MiB; to set the second one where the first was refused would make things worse.
    if mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25):
        mallopt(M_TRIM_THRESHOLD, 2**30)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end it now if that has happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before prctl could watch it
        os._exit(1)


if parent_pid := os.environ.pop(PARENT_VARIABLE, ""):
    end_with_parent(int(parent_pid))
