"""Settings of a node: its number, the addresses it binds or dials, and its key."""

from __future__ import annotations

import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import a3c_mp
from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import temporary_folder
from a3c_mp.task.keys import KeyPair, make_key, read_key

MAX_IPC_PATH = 107
"""bytes of the path of a Unix socket, without the zero at its end"""
TCP_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


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
        """Check all addresses, and read the key where one is TCP; a node that listens creates it.

        Raises:
            ConfigError: an address or the key file is invalid.
            ValueError: the folder of an ipc address is open to other users, or its path too long.
        """
        flag = "attach-to" if self.dials else "listen"
        key = None
        for address in filter(None, (*self.binds, self.dials)):
            if not is_tcp(address):
                _check_ipc(address)
                continue
            host, port = check_tcp(flag, address)
            if self.dials:
                _check_host(host, port)
            if self.key_file is None:
                fix = "add --key-file FILE, with the same file at every node"
                raise ConfigError(flag, address, "TCP needs a key", fix)
            key = read_key(self.key_file) if self.dials else make_key(self.key_file)
        return key


def local_endpoints(folder: Path, labels: list[tuple[str, ...]], listen: str | None, **settings: Any) -> list[Endpoint]:
    """Endpoints of nodes on one machine, which connect to node 0 through a Unix socket.

    Args:
        folder: from `ipc_folder`.
        labels: of each node; their count is the number of nodes.
        listen: tcp:// address at which node 0 also lets other nodes join; needs `key_file`.
        settings: other fields of `Endpoint`, for node 0.
    """
    address = f"ipc://{folder}/0"
    hub = Endpoint(0, (address, *([listen] if listen else [])), labels=labels[0], num_nodes=len(labels), **settings)
    return [hub, *(Endpoint(number, dials=address, labels=own) for number, own in enumerate(labels) if number > 0)]


@contextmanager
def ipc_folder() -> Iterator[Path]:
    """A temporary folder for Unix sockets, with mode 0700; removed at the end, also if this process is killed."""
    root = tempfile.gettempdir()
    with temporary_folder(root if len(root.encode()) <= MAX_IPC_PATH - 30 else "/tmp") as folder:
        yield folder


def is_tcp(address: str) -> bool:
    return not address.startswith("ipc://")


def check_tcp(flag: str, address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ConfigError."""
    found = TCP_ADDRESS.fullmatch(address)
    if not found or int(found[2]) > 65535 or (flag == "attach-to" and int(found[2]) == 0):
        raise ConfigError(flag, address, "is not tcp://HOST:PORT", "for instance tcp://127.0.0.1:50515")
    return found[1].strip("[]"), int(found[2])


def _check_host(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = f"the host is unknown ({getattr(error, 'strerror', error)})"
        raise ConfigError("attach-to", f"tcp://{host}:{port}", why, "give its name or IP address") from error


def _check_ipc(address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    if len(str(path).encode()) > MAX_IPC_PATH:
        raise ValueError(f"{address} is longer than {MAX_IPC_PATH} bytes")
    if path.parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path.parent} is open to other users; use ipc_folder()")
