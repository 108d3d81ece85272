"""Spawned child processes: how they start, how they end, and what their parent hears of that.

They leave Ctrl-C and a scheduler's warnings to their parent and do not outlive it. A worker leads a process group.
Whatever an environment has started in it (a simulator, a browser) is killed when the worker ends: by the parent, before
it collects the worker's exit code, or by the watchdog when the parent itself is gone. What an environment puts into a
group or session of its own is left to its `close()`.
"""

import faulthandler
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import current_process, popen_spawn_posix, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any

from a3c_mp._bootstrap import PARENT_VARIABLE, end_with_parent, open_memory
from a3c_mp.errors import ConfigError, Terminated
from a3c_mp.processes.prints import print_into, prints
from a3c_mp.processes.watchdog import WARNINGS, Watchdog

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)
"""signals by which a user, a shell, a scheduler or a machine that shuts down ends a script"""
MAX_MESSAGE = 4096 - 4
"""bytes; PIPE_BUF on Linux, the most that a pipe takes in one piece, less the length that stands before a message"""
ERROR, DONE, STARTING = "error", "done", "starting"
"""kinds of messages to a supervisor: `(ERROR, traceback)`, the last one; `(DONE,)` of a process that is not to be
replaced; `(STARTING,)`: what takes as long as a start, such as making environments, follows
"""
_watchdog = Watchdog()
TERMINATED: list[int] = []  # SIGTERM, once it has arrived: an environment may have caught the exception


def start_child(main: Callable[..., None], args: tuple, *, name: str, daemon: bool, group: bool = False) -> Any:
    """Spawn a process that runs `main(*args)`; to be called from the main thread, as the child ends with its thread.

    `main` is a module-level function; `args` are pickled, and shared tensors stay shared. A `daemon` is ended when this
    process exits. With `group` the child leads a process group, which is killed with it. Raises OSError or RuntimeError
    where the machine, or a limit of the user's, allows no further process or thread.
    """
    try:
        os.getcwd()
    except OSError:  # the folder was deleted, and a new process would look for it
        os.chdir("/")
    pipe = prints.open_pipe()
    kind = GroupLeader if group else SpawnProcess
    arguments = _Arguments((os.getpid(), pipe, main, args, group))
    process = kind(target=_main, args=(arguments,), name=name, daemon=daemon)
    # What is blocked stays blocked in a child from its first instruction on, through all its imports.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        resource_tracker.ensure_running()  # else the first child would start it, and that unblocks SIGINT
        if group:
            _watchdog.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with open(open_memory("a3c_mp-arguments"), "w+b") as arguments.file:
            _start(process)
    finally:
        del os.environ[PARENT_VARIABLE]
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        if pipe is not None:
            pipe.close()  # the child has its own copy; with this one closed, its end reads as an end of file
    return process


def _start(process: SpawnProcess) -> None:
    """Start a process, which imports the script of this one only if something that it needs is defined there.

    So a script without `if __name__ == "__main__"` is not run again in each child, unless it has classes or functions
    that go to one. `multiprocessing` finds out what to import from the module `__main__`, which is hidden meanwhile.
    """
    script = sys.modules["__main__"]
    if not hasattr(script, "__spec__"):  # pdb removes it
        script.__spec__ = None
    names = [name for name in ("__main__", "__mp_main__") if name in sys.modules]  # the latter: in a child
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        process.start()
    except (pickle.PicklingError, AttributeError):  # it needs what is hidden
        sys.modules.update(dict.fromkeys(names, script))
        process.start()
    finally:
        sys.modules.update(dict.fromkeys(names, script))


class _Arguments(tuple):
    """Arguments of a child: pickled into a file in memory, which it inherits.

    Into the pipe of `multiprocessing`, a parent writes until a child has read all, forever if it dies before it has.
    """

    file: IO[bytes]

    def __reduce__(self) -> tuple[Any, ...]:
        self.file.truncate(0)  # a first attempt to pickle them may have failed
        self.file.seek(0)
        ForkingPickler(self.file).dump(tuple(self))
        self.file.seek(0)  # for the child, too
        return _read, (DupFd(self.file.fileno()),)


def _read(file: Any) -> tuple:
    with open(file.detach(), "rb") as pickled:
        return pickle.load(pickled)


def _main(arguments: _Arguments) -> None:
    """Entry point of every child process."""
    parent_pid, pipe, main, args, group = arguments
    if group:
        os.setpgid(0, 0)
        current_process().daemon = False  # an environment may use `multiprocessing`; the group's end is theirs
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    end_with_parent(parent_pid)
    if pipe is not None:
        print_into(pipe)
    faulthandler.enable()  # a crash in native code names the Python line that led to it
    for signum in (signal.SIGINT, *WARNINGS):  # the parent decides what they do
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # an environment may have a handler of its own
    with suppress(OSError):  # no /proc
        Path("/proc/self/comm").write_text(current_process().name[:15])  # `top` shows "worker-3" instead of "python"
    main(*args)


class _Popen(popen_spawn_posix.Popen):
    """A child whose process group is killed when its exit code is collected, or by the watchdog."""

    def _launch(self, process_obj: Any) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        _watchdog.add(self.pid)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        was_running = self.returncode is None
        code = super().poll(flag)
        if was_running and code is not None:  # as long as the group has members, no other process gets its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            _watchdog.discard(self.pid)
        return code


class GroupLeader(SpawnProcess):
    """A spawned process that leads a process group."""

    _Popen = staticmethod(_Popen)


def run_supervised(
    main: Callable[[], None], pipe: Connection, *, close: Callable[[], None] = lambda: None,
    leave: Callable[[int], Any] = sys.exit,
) -> None:  # fmt: skip
    """Run `main()` in a child process, then `close()`, however it ends; send an exception's traceback to the parent.

    SIGTERM raises Terminated in `main`, and changes nothing in `close`. After an exception, `leave` is called with exit
    code 1.
    """
    signal.signal(signal.SIGTERM, raise_terminated)
    failed = terminated = False
    try:
        try:
            main()
        except Terminated:
            raise
        except BaseException:  # an environment's SystemExit too
            failed = True
            text = traceback.format_exc().encode(errors="backslashreplace")[-3 * MAX_MESSAGE // 4 :]
            with suppress(OSError):  # the parent is gone
                pipe.send((ERROR, text.decode(errors="replace")))
    except Terminated:  # also while the traceback is sent
        terminated = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if terminated:  # to the parent, and to the sender, it ends as any other program does
        os.kill(os.getpid(), signal.SIGTERM)
    if failed:
        leave(1)


def raise_terminated(signum: int, frame: FrameType | None) -> None:
    """Signal handler that unwinds the process; a second signal does not interrupt what is closed on the way."""
    signal.signal(signum, signal.SIG_IGN)
    TERMINATED.append(signum)
    raise Terminated


def root_for_sockets(longest: int) -> str:
    """A folder for temporary ones of Unix sockets: its path has `longest` bytes at most, as theirs have at most 107.

    It is the one for temporary files, or another that is shorter and can be written. Raises ConfigError.
    """
    roots = ["/tmp", "/var/tmp", "/dev/shm"]
    with suppress(OSError):  # there is none that can be written
        roots.insert(0, tempfile.gettempdir())
    for root in roots:
        if len(os.fsencode(root)) <= longest and os.access(root, os.W_OK | os.X_OK):
            return root
    why = f"Unix sockets need a folder whose path has at most {longest} bytes; none of {', '.join(roots)} can be used"
    raise ConfigError("TMPDIR", os.environ.get("TMPDIR", ""), why, "let it name a folder that can be written")


def remove_at_end(path: Path) -> None:
    """Have a folder, or the files of a pattern, removed once this process is gone, however it ended."""
    _watchdog.ensure_running()
    _watchdog.add(path)


@contextmanager
def temporary_folder(root: str) -> Iterator[Path]:
    """A new folder below `root`, with mode 0700; removed at the end, or once this process is gone, however it ended."""
    folder = Path(root, f"a3c-{secrets.token_hex(8)}")
    try:
        remove_at_end(folder)  # first: this process may be killed in between
        folder.mkdir(mode=0o700)
    except OSError as error:
        fix = "make room there, raise the limit on processes (ulimit -u), or let TMPDIR name another"
        raise ConfigError("TMPDIR", root, f"no folder can be made there ({error.strerror})", fix) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _watchdog.discard(folder)
