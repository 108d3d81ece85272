"""Settings of a node: its number, the addresses it binds or dials, and the key file of a task on TCP."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq

import a3c_mp
from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import temporary_folder

MAX_IPC_FOLDER = 77  # bytes; the path of a Unix socket can have 107
TCP_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
FLAG = "key-file"
Z85_SIZE = 40  # characters of a key in Z85
COPY_IT = "copy the file of the node that listens"


class KeyPair(NamedTuple):
    """A CURVE key pair, in Z85. All nodes of a task use the same one."""

    public: bytes
    secret: bytes


def node_name(number: int) -> str:
    return f"node.{number}"


def number_of(name: str) -> int:
    """Number of a node, by its name."""
    return int(name.removeprefix("node."))


def installed_versions() -> dict[str, str]:
    """Versions that all nodes must share. Builds of torch for CPU and CUDA count as the same."""
    return {"a3c_mp": a3c_mp.__version__, "torch": str(torch.__version__).split("+")[0]}


@dataclass(frozen=True)
class Endpoint:
    """How a node is reached, or whom it reaches; can be pickled, for nodes that are spawned.

    Node 0 binds addresses, and all other nodes connect to one of them. A node without any address is alone.
    """

    number: int = 0
    """of this node, if it is node 0 or has been started by it; others get theirs when they join"""
    binds: tuple[str, ...] = ()
    """addresses at which other nodes reach node 0"""
    dials: str = ""
    """address of node 0, for another node"""
    labels: tuple[str, ...] = ()
    """of this node, besides its name"""
    key_file: Path | None = None
    """secret key for TCP; made by the node that listens, if missing"""
    greeting: dict[str, Any] = field(default_factory=dict)
    """JSON values that node 0 sends to each node that joins"""
    versions: dict[str, str] = field(default_factory=installed_versions)
    """a node with others is refused"""
    num_nodes: int = 1
    """nodes that are started together; those that join get numbers from here on"""

    @property
    def name(self) -> str:
        return node_name(self.number)

    def load_key(self) -> KeyPair | None:
        """Check the addresses, and read the key where one is TCP; a node that listens creates it.

        Raises:
            ConfigError: an address or the key file is invalid.
        """
        flag, key = "attach-to" if self.dials else "listen", None
        for address in filter(is_tcp, (*self.binds, self.dials)):
            check_tcp(flag, address)
            if self.key_file is None:
                fix = "add --key-file FILE, with the same file at every node"
                raise ConfigError(flag, address, "TCP needs a key", fix)
            key = read_key(self.key_file) if self.dials else make_key(self.key_file)
        return key


def local_endpoints(folder: Path, labels: list[tuple[str, ...]], listen: str | None, **settings: Any) -> list[Endpoint]:
    """Endpoints of nodes on one machine, which connect to node 0 through a Unix socket in a folder of `ipc_folder`.

    Args:
        labels: of each node; their count is the number of nodes.
        listen: tcp:// address at which node 0 also lets other nodes join.
        settings: other fields of `Endpoint`, for node 0.
    """
    address = f"ipc://{folder}/0"
    hub = Endpoint(0, (address, *([listen] if listen else [])), labels=labels[0], num_nodes=len(labels), **settings)
    return [hub, *(Endpoint(number, dials=address, labels=own) for number, own in enumerate(labels) if number > 0)]


@contextmanager
def ipc_folder() -> Iterator[Path]:
    """A temporary folder for Unix sockets, with mode 0700; removed at the end, also if this process is killed."""
    root = tempfile.gettempdir()
    with temporary_folder(root if len(root.encode()) <= MAX_IPC_FOLDER else "/tmp") as folder:
        yield folder


def is_tcp(address: str) -> bool:
    return not address.startswith("ipc://") and address != ""


def check_tcp(flag: str, address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ConfigError."""
    found = TCP_ADDRESS.fullmatch(address)
    if not found or int(found[2]) > 65535 or (flag == "attach-to" and int(found[2]) == 0):
        raise ConfigError(flag, address, "is not tcp://HOST:PORT", "for instance tcp://127.0.0.1:50515")
    return found[1].strip("[]"), int(found[2])


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
    except OSError as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ConfigError(FLAG, path, what, COPY_IT) from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError(FLAG, path, f"other users can access it (mode {stat.S_IMODE(mode):04o})", "chmod 600 it")
    try:
        if len(text) != Z85_SIZE:
            raise ValueError(f"{len(text)} characters")
        return KeyPair(zmq.curve_public(text), text)
    except (zmq.ZMQError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(FLAG, path, f"holds no CURVE key of {Z85_SIZE} characters", COPY_IT) from error
