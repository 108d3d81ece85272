"""Settings of a node: its number, the addresses it binds and dials, and who may join it."""

from __future__ import annotations

import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import a3c_mp
from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import temporary_folder
from a3c_mp.task.keys import KeyPair, make_key, read_key

MAX_IPC_PATH = 107
"""bytes of the path of a Unix socket, without the zero at its end"""
TCP_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")

Topology = Literal["alone", "star", "mesh"]


def node_name(number: int | None) -> str:
    return "node" if number is None else f"node.{number}"


def installed_versions() -> dict[str, str]:
    """Versions that all nodes must share. Builds of torch for CPU and CUDA count as the same."""
    return {"a3c_mp": a3c_mp.__version__, "torch": str(torch.__version__).split("+")[0]}


class Peer(NamedTuple):
    """A node, as other nodes know it."""

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """How a node is reached and whom it reaches; can be pickled, for nodes that are spawned."""

    number: int | None = 0
    """of this node; 0 is the hub of a star. None: the hub gives a node that attaches the next free one"""
    topology: Topology = "alone"
    binds: tuple[str, ...] = ()
    """addresses at which other nodes reach this one"""
    dials: tuple[str, ...] = ()
    """addresses of the nodes that this one connects to, that of node 0 first"""
    labels: tuple[str, ...] = ()
    """of this node, besides its name"""
    key_file: Path | None = None
    """secret key for TCP; made by the node that listens, if missing"""
    greeting: dict[str, Any] = field(default_factory=dict)
    """JSON values that each node that joins this one receives"""
    versions: dict[str, str] = field(default_factory=installed_versions)
    """a node with others is refused"""
    num_nodes: int = 1
    """nodes that are started together; those that attach get numbers from here on"""
    local_secret: str = field(default="", repr=False)
    """that only the nodes that are started together know: it allows a node to have one of their numbers"""

    def load_key(self) -> KeyPair | None:
        """Check all addresses, and read the key where one is TCP; a node that listens creates it.

        Raises:
            ConfigError: an address or the key file is invalid.
            ValueError: the folder of an ipc address is open to other users, or its path too long.
        """
        listens = [check_tcp("listen", address) for address in self.binds if is_tcp(address)]
        attaches = [check_tcp("attach-to", address) for address in self.dials if is_tcp(address)]
        for address in (*self.binds, *self.dials):
            if not is_tcp(address):
                _check_ipc(address)
        for host, port in attaches:
            _check_host(host, port)
        if not listens and not attaches:
            return None
        if self.key_file is None:
            flag = "listen" if listens else "attach-to"
            address = next(filter(is_tcp, self.binds if listens else self.dials))
            raise ConfigError(flag, address, "TCP needs a key", "add --key-file FILE, with the same file at every node")
        return make_key(self.key_file) if listens else read_key(self.key_file)


def local_endpoints(
    folder: Path, topology: Topology, labels: Sequence[tuple[str, ...]], listen: str | None = None, **settings: Any
) -> list[Endpoint]:
    """Endpoints of nodes on one machine, connected through Unix sockets.

    Args:
        folder: from `ipc_folder`.
        labels: of each node; their count is the number of nodes.
        listen: tcp:// address at which node 0 also lets other nodes join; needs `key_file`.
        settings: other fields of `Endpoint`, for all nodes.
    """
    addresses = [f"ipc://{folder}/{number}" for number in range(len(labels))]
    settings |= {"num_nodes": len(labels), "local_secret": secrets.token_hex(16)}
    ends = []
    for number, own_labels in enumerate(labels):
        bound = number == 0 or topology == "mesh"
        binds = [addresses[number]] if bound else []
        dials = tuple(addresses[: number if topology == "mesh" else min(number, 1)])
        if number == 0 and listen is not None:
            binds.append(listen)
        ends.append(Endpoint(number, topology, tuple(binds), dials, own_labels, **settings))
    return ends


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
