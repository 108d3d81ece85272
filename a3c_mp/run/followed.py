"""What a run tells the program that started it (`a3c_mp.train`): lines of JSON in a file that this program reads."""

import json
import os
import sys
from typing import Any

from a3c_mp.errors import ConfigError, shown

VARIABLE = "A3C_MP_FOLLOWED"  # environment variable with the path of the file, in the processes of such a run


def tell(**facts: Any) -> bool:
    """Add a line to the file, which nobody has to read for the run to go on. Returns whether it is written."""
    if (path := os.environ.get(VARIABLE)) is None:
        return False
    try:
        with open(path, "a") as file:
            file.write(f"\n{json.dumps(facts, default=float)}\n")  # the line before may have been cut short
    except OSError:  # a full disk costs that program the line
        return False
    return True


def report_error(error: ConfigError) -> None:
    """Tell that program about an error, which it raises; or print it."""
    if not tell(error=[error.what, *map(shown, map(str, (error.value, error.why, error.fix)))]):
        print(f"error: {error}", file=sys.stderr)
