"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; the previous one stays until the new one is complete. Raises OSError."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file (`.tmp`), sync it, rename it into place, sync the folder. Raises OSError."""
    write_together({path: lambda file: file.write(content)})


def write_together(files: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files of one folder as `write_atomically` does; none is renamed before all of them are on disk.

    A full disk therefore leaves all of them as they were; a kill between two renames does not. Raises OSError.
    """
    temporary = {path: path.with_suffix(path.suffix + ".tmp") for path in files}
    try:
        for path, write in files.items():
            with temporary[path].open("w+b") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in files:
            os.replace(temporary[path], path)
            sync_folder(path.parent)  # the rename, too, must survive a power cut, and before the next one
    except OSError:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
