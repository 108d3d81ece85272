"""Files that only their owner may use: keys and tokens, and folders of such files."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from a3c_mp.errors import ConfigError


def check_private(name: str, path: Path, fix: str) -> Path:
    """Return the path of what only its owner may use. Raises ConfigError if others may."""
    if path.stat().st_mode & 0o077:
        raise ConfigError(name, path, "other users may use it", f"chmod go= {path}, or {fix}")
    return path


def read_private(name: str, path: Path, fix: str, make: Callable[[], str] | None = None) -> bytes:
    """Return the content of a secret file; where there is none, `make` gives that of a new one, of mode 0600.

    Raises ConfigError if it cannot be read or made (setting `name`, `fix`), or others may use it.
    """
    try:
        if make is not None and not path.exists():
            descriptor, new = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # of mode 0600
            try:
                with open(descriptor, "w") as file:
                    file.write(make())
                with suppress(FileExistsError):
                    os.link(new, path)  # whole, or not there
            finally:
                os.unlink(new)
        content = b"" if path.is_fifo() else path.read_bytes()  # a pipe without a writer would block
    except OSError as error:
        what, fix = ("read", fix) if make is None else ("made", "choose another")
        raise ConfigError(name, path, f"it cannot be {what} ({error.strerror})", fix) from error
    check_private(name, path, "make a new one")
    return content.strip()
