"""Errors in modules of the user's own, in one line that keeps where they are from; imported where one is raised."""

import os
import sysconfig
import traceback
from pathlib import Path

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = {"site-packages", "dist-packages"}


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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    frames = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    packages = [frame for frame in frames if _PACKAGES & set(Path(frame.filename).parts)]
    python = sysconfig.get_paths()["stdlib"] + os.sep  # outside of virtual environments it has the packages in it
    own = [frame for frame in frames if frame not in packages and not frame.filename.startswith(python)]
    return next(reversed(own or packages), None)


def is_missing(error: BaseException, module: str) -> bool:
    """Whether an import of `module` failed because there is none, and not for what it imports itself."""
    return module != "" and isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
