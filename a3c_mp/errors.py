"""The errors of this library. Each message says who, what and what to do; scripts print it instead of a traceback."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

STARTED_IN: list[Path] = []  # the current folder when the command line was read


def start_here() -> Path:
    """The current folder: paths of the command line are relative to it, also once an environment has left it."""
    try:
        STARTED_IN[:] = [Path.cwd()]
    except OSError as error:
        raise ConfigError("current folder", "", f"it cannot be found ({error.strerror})", "cd to another") from None
    return STARTED_IN[0]


def shown(text: str) -> str:
    """A text for users: paths below the folder in which the script was started are relative to it."""
    return re.sub(rf"(?<![\w.:/-]){re.escape(str(STARTED_IN[0]))}/", "", text) if STARTED_IN else text


def one_line(error: BaseException) -> str:
    """Kind and message of any error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class A3CError(Exception):
    """What a run can fail with for a reason that is known."""


class ConfigError(A3CError):
    """Bad input, found before any process starts: one line for the user, exit code 2.

    `what` is the setting, as its flag is spelled, and `value` what was given; "" if nothing was.
    """

    def __init__(self, what: str, value: object, why: str, fix: str = ""):
        # Of an array, `==` compares the elements.
        self.given = what if isinstance(value, str) and not value else f"{what}={value}"
        self.what, self.value, self.why, self.fix = what, value, why, fix
        super().__init__(what, value, why, fix)  # what it is unpickled from

    def __str__(self) -> str:
        return shown(" ".join(f"{self.given}: {self.why}; {self.fix}".split()).removesuffix(";"))


class NothingToDo(A3CError):
    """A resumed run has reached its goal or spent its budget before: one line for the user, exit code 0."""


class TrainingError(A3CError):
    """Training diverged, for instance to a loss of NaN."""


class WorkerError(A3CError):
    """A worker failed, and restarting it does not help."""


class PeerLost(WorkerError):
    """Another learner has died or does not answer."""


class CheckpointError(A3CError):
    """A checkpoint cannot be used; the message names the file and the reason."""


class Terminated(BaseException):
    """Unwinds a worker that has received SIGTERM; no `except Exception` of an environment stops it."""


class Stopped(SystemExit):
    """A signal ends the process before there is anything to save."""


def describe(error: BaseException) -> str:
    """Type, message and place of an error in code of the user's own, and of the errors that led to it, in one line."""
    text, link, seen = "", "", set[int]()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        lines, frame = traceback.format_exception_only(following), _last_frame(following)
        if isinstance(following, SyntaxError):  # file and source, which stand before its message
            lines = [line for line in lines if not line.startswith("  ")]
        message = "".join(lines)
        if frame is not None:
            if ":" not in message:  # there is no text: of an `assert` its source says most
                message = f"{message.strip()}: {frame.line or ''}"
            path = Path(frame.filename)
            name = f"{path.parent.name}/{path.name}" if path.stem == "__init__" else path.name
            message = f"{message.rstrip().rstrip('.:')} ({name}:{frame.lineno})"
        text += link + " ".join(message.split()).rstrip(".:")
        if isinstance(following, BaseExceptionGroup):
            text += "".join(f", with {describe(inner)}" for inner in following.exceptions)
        link = ", while handling " if following.__cause__ is None else ", caused by "
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return text


def _last_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last line of the user's own files that an error passed, or else of the library that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return traceback.FrameSummary(error.filename, error.lineno or 0, "", line=error.text or "")
    stack, ours = traceback.extract_tb(error.__traceback__), f"{Path(__file__).parent}{os.sep}"
    frames = [frame for frame in stack if not frame.filename.startswith(("<", ours))]
    packages = [frame for frame in frames if {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)]
    python = sysconfig.get_paths()["stdlib"] + os.sep  # outside of virtual environments it has the packages in it
    own = [frame for frame in frames if frame not in packages and not frame.filename.startswith(python)]
    return next(reversed(own or packages), None)


def is_missing(error: BaseException, module: str) -> bool:
    """Whether an import of `module` failed because there is none, and not for what it imports itself."""
    return module != "" and isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
