"""The key file of a task on TCP: one CURVE secret key, which every node that connects over TCP must have."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

from a3c_mp.errors import ConfigError

FLAG = "key-file"
Z85_SIZE = 40
"""characters of a key in Z85"""
COPY_IT = "copy the file of the node that listens"


class KeyPair(NamedTuple):
    """A CURVE key pair, in Z85. All nodes of a task use the same one."""

    public: bytes
    secret: bytes


def make_key(path: Path) -> KeyPair:
    """Read the key file; create it, with mode 0600, where there is none. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_key(path)
    except OSError as error:
        raise ConfigError(FLAG, path, f"cannot be created ({error.strerror})", "choose another file") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(zmq.curve_keypair()[1] + b"\n")
    return read_key(path)


def read_key(path: Path) -> KeyPair:
    """Read the key pair of a key file. Raises ConfigError if it is missing, malformed or readable by other users."""
    try:
        # A pipe without a writer would block the opening.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(2 * Z85_SIZE).strip() if stat.S_ISREG(mode) else b""
    except FileNotFoundError as error:
        raise ConfigError(FLAG, path, "there is no such file", COPY_IT) from error
    except OSError as error:
        raise ConfigError(FLAG, path, f"cannot be read ({error.strerror})", "choose another file") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(FLAG, path, "is not a regular file", "choose another file")
    if mode & 0o077:
        raise ConfigError(FLAG, path, f"other users can access it (mode {stat.S_IMODE(mode):04o})", "chmod 600 it")
    try:
        if len(text) != Z85_SIZE:
            raise ValueError(f"{len(text)} characters")
        return KeyPair(zmq.curve_public(text), text)
    except (zmq.ZMQError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(FLAG, path, f"holds no CURVE key of {Z85_SIZE} characters", COPY_IT) from error
