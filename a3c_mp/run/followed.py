"""What a run tells the program that started it (`a3c_mp.train`): files of JSON in a folder that this program reads."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from a3c_mp.errors import ConfigError, shown

VARIABLE = "A3C_MP_FOLLOWED"  # environment variable with the path of the folder, in the processes of such a run


def tell(**facts: Any) -> bool:
    """Add a file; the run goes on also if it is never read. Returns whether it is written."""
    if (folder := os.environ.get(VARIABLE)) is None:
        return False
    path = Path(folder, f"{time.monotonic_ns():020}.tmp")
    try:
        path.write_text(json.dumps(facts, default=float))
        path.rename(path.with_suffix(".json"))
    except OSError:  # a full disk costs that program these facts
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return False
    return True


def take_told(folder: Path) -> Iterator[dict[str, Any]]:
    """What was told since the last call, which is removed from the folder."""
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text())
        path.unlink()
        yield facts


def report_error(error: ConfigError) -> None:
    """Tell that program about an error, which it raises; or print it."""
    if not tell(error=[error.what, *map(shown, map(str, (error.value, error.why, error.fix)))]):
        print(f"error: {error}", file=sys.stderr)
