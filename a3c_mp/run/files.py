"""Files that are written whole or not at all, and folders whose names are on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; the previous one stays until the new one is complete. Raises OSError."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file, sync it, rename it into place, sync the folder. Raises OSError.

    Args:
        path: the file; the temporary one has the suffix `.tmp` in addition.
        content: the bytes, or for what is too large to hold in memory a function that writes to the open file.
    """
    write_together({path: content})


def write_together(files: Mapping[Path, bytes | Callable[[BinaryIO], object]]) -> None:
    """Write files of one folder as `write_atomically` does; none is renamed before all of them are on disk.

    A full disk therefore leaves all of them as they were; a kill between two renames does not. Raises OSError.
    """
    temporary = {path: path.with_suffix(path.suffix + ".tmp") for path in files}
    try:
        for path, content in files.items():
            with temporary[path].open("wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in files:
            os.replace(temporary[path], path)
            sync_folder(path.parent)  # the rename, too, must survive a power cut, and before the next one
    except OSError:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync the folders that hold the new names. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
