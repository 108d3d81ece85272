"""Process setup by `import a3c_mp`, before torch is imported: threads, malloc, the end with the parent, sys.path."""

import importlib.util
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
from types import FrameType
from typing import NoReturn

for fd, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
    try:
        os.fstat(fd)
    except OSError:  # closed: the null device, or another file would get its number
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number, fd
    if getattr(sys, name) is None:
        setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
        setattr(sys, f"__{name}__", getattr(sys, name))
    if mode == "w":
        with suppress(AttributeError, ValueError):  # replaced by something without encoding
            getattr(sys, name).reconfigure(errors="backslashreplace")

import ctypes  # noqa: E402  # only now: libffi keeps a file open

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MADV_HUGEPAGE, HUGE_PAGE = 14, 2**21  # of madvise(2)
OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
HEAP = ctypes.c_size_t(2**30 - 2 * HUGE_PAGE)
PR_SET_PDEATHSIG, MFD_CLOEXEC = 1, 1  # of prctl(2), memfd_create(2)

PARENT_VARIABLE = "A3C_MP_PARENT_PID"
"""environment variable with the parent's pid, and the signal at its end if that is not SIGKILL; read before imports"""

# Threads of OpenMP, which reads their number once, when it loads, would compete with processes for the same cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; --deterministic needs it

ENDING = {int(number) for number in os.environ.get(PARENT_VARIABLE, "").split()[1:]}
"""signals by which the parent ends this process: handled here, also where they were ignored when it started"""
IGNORED_AT_START = frozenset(s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN) - ENDING
"""other signals that were ignored when the process started (by nohup: SIGHUP); environments may ignore more later"""

if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # by what started this program: exit codes would be lost
    with suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

# glibc returns every large block to the kernel at once and requests it again, zeroed page by page, at the next gradient
# step: a fifth of the learner's time on a CPU. Here freed memory stays in the process.
with suppress(OSError, AttributeError):  # another C library
    libc = ctypes.CDLL(None)
    # Older versions refuse more than 32 MiB. Setting the second option without the first is worse than setting neither.
    if libc.mallopt(M_MMAP_THRESHOLD, 2**30) or libc.mallopt(M_MMAP_THRESHOLD, 2**25):
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    libc.malloc.restype = ctypes.c_void_p
    # The heap's next gigabyte is to have huge pages; it is given back untouched. Not where a limit counts it.
    is_counted = getrlimit(RLIMIT_AS)[0] != RLIM_INFINITY or Path(OVERCOMMIT).read_text().strip() == "2"
    if not is_counted and os.sysconf("SC_PAGE_SIZE") == 4096 and (block := libc.malloc(HEAP)):
        start = -(-block // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(ctypes.c_void_p(start), HEAP, MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))


def open_memory(name: str) -> int:
    """Open an anonymous file (memfd_create), also where Python was built against an older glibc, as conda's is."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    if (descriptor := ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), MFD_CLOEXEC)) < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return descriptor


def end_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends; exit now if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent_pid:  # the parent died before prctl could watch it
        os._exit(1)


if parent_pid := os.environ.pop(PARENT_VARIABLE, ""):
    end_with_parent(*map(int, parent_pid.split()))

CHAPTERS = Path(__file__).resolve().parent / "chapters"
if not CHAPTERS.is_dir():
    CHAPTERS = CHAPTERS.parents[1]
"""folder of the scripts: `a3c_mp/chapters` of an installed package, the root of the source tree"""
if str(CHAPTERS) not in sys.path:
    sys.path.append(str(CHAPTERS))  # a chapter imports from earlier ones; last, as other packages may have their names


def is_script() -> bool:
    """Whether this process is one of the project's scripts, rather than another program that uses the library."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:  # `python -m` imports the package of the module first
        return "a3c_mp.cluster" in sys.orig_argv
    is_named = Path(main).name.startswith(("train_", "play.py", "plot.py"))  # a user's program may lie beside them
    return (is_named and Path(main).resolve().parent == CHAPTERS) or Path(main).name == "a3c-mp"


missing = [name for name in ("torch", "gymnasium", "rich") if importlib.util.find_spec(name) is None]
if missing and is_script():
    fix = ". .venv/bin/activate (or make train, which installs it)"
    print(f"error: this Python has no {' and no '.join(missing)}; {fix}", file=sys.stderr)
    sys.exit(2)


def end_on_interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(128 + signum)


if is_script() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While torch is imported; later, `exit_with` has handlers of its own.
    signal.signal(signal.SIGINT, end_on_interrupt)
