"""What a run tells the program that started it (`a3c_mp.train`): lines of JSON in a file that this program reads."""

import fcntl
import json
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from a3c_mp.errors import ConfigError, shown

VARIABLE = "A3C_MP_FOLLOWED"  # environment variable with the path of the file, in the processes of such a run


def tell(**facts: Any) -> bool:
    """Add a line to the file, which nobody has to read for the run to go on. Returns whether it is written."""
    if (path := os.environ.get(VARIABLE)) is None:
        return False
    try:
        with open(path, "a") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"\n{json.dumps(facts, default=float)}\n")  # the line before may have been cut short
    except OSError:  # a full disk costs that program the line
        return False
    return True


def take_told(file: TextIO) -> str:
    """Text that was added to the file (opened as r+) since the last call; what is read is removed from it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: the file grows
        return file.read()
    try:
        text = file.read()
        file.seek(0)
        file.truncate()
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a copy of it in a forked process would keep the lock
    return text


def report_error(error: ConfigError) -> None:
    """Tell that program about an error, which it raises; or print it."""
    if not tell(error=[error.what, *map(shown, map(str, (error.value, error.why, error.fix)))]):
        print(f"error: {error}", file=sys.stderr)
