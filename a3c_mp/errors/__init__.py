"""The errors of this library. Each message says who, what and what to do; scripts print it instead of a traceback."""

import re
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
        self.given = what if value == "" else f"{what}={value}"
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
