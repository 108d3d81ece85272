"""Settings of a node: its number, the addresses it binds or dials, and the key file of a task on TCP."""

import itertools
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.processes.private_files import read_private
from a3c_mp.processes.program import describe_program
from a3c_mp.processes.spawn import root_for_sockets, temporary_folder

PROTOCOL = "2"  # of messages between nodes
MAX_IPC_FOLDER = 77  # bytes; the path of a Unix socket can have 107
TCP_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
FLAG = "key-file"
COPY_IT = "copy the file of the node that listens"


class KeyPair(NamedTuple):
    """A CURVE key pair in Z85, the same one for all nodes of a task."""

    public: bytes
    secret: bytes


def node_name(number: int) -> str:
    return f"node.{number}"


def number_of(name: str) -> int:
    return int(name.removeprefix("node."))


@dataclass(frozen=True)
class Endpoint:
    """Where a node is reached (node 0), or whom it reaches (all others); a node without any address is alone."""

    number: int = 0  # of node 0 and those that it has started; others get theirs when they join
    binds: tuple[str, ...] = ()  # addresses of node 0
    dials: str = ""  # address of node 0, for another node
    labels: tuple[str, ...] = ()  # of this node, besides its name
    known_labels: tuple[str, ...] = ()  # of the nodes that are started together; empty if they are not known
    open_labels: bool = False  # others may join, with any labels
    key_file: Path | None = None  # secret key for TCP; made by the node that listens, if missing
    greeting: dict[str, Any] = field(default_factory=dict)  # JSON values that node 0 sends to each node that joins
    versions: dict[str, str] = field(default_factory=lambda: {"protocol": PROTOCOL, **describe_program()})
    """of this node; one that joins is refused where `differences` of them matter"""
    accepts: tuple[str, ...] = ()  # events that node 0 takes from nodes of other machines; empty if any
    max_connections: int = 256  # to node 0 from other machines
    max_waiting: int = 16 * 2**20  # bytes to and from them that wait, at most; a node may take half of what is free
    num_nodes: int = 1  # that are started together; those that join get numbers from here on

    def load_key(self) -> KeyPair | None:
        """Check the addresses, and read the key if one is TCP; a node that listens creates it. Raises ConfigError."""
        flag, key = "attach-to" if self.dials else "listen", None
        for address in filter(is_tcp, (*self.binds, self.dials)):
            check_tcp(flag, address)
            if self.key_file is None:
                raise ConfigError(flag, address, "TCP needs a key", "add --key-file FILE, the same one at every node")
            key = read_key(self.key_file, make=not self.dials)
        return key


def local_endpoints(folder: Path, labels: list[tuple[str, ...]], listen: str | None, **settings: Any) -> list[Endpoint]:
    """Endpoints of nodes on one machine, which connect to node 0 through a Unix socket in a folder of `ipc_folder`.

    Node 0 also listens at tcp://HOST:PORT if `listen` is that; `settings` are its other fields.
    """
    address, names = f"ipc://{folder}/0", map(node_name, range(len(labels)))
    known = tuple(sorted({"distributed", *names, *itertools.chain(*labels)}))
    binds = (address, *([listen] if listen else []))
    common: dict[str, Any] = {"known_labels": known, "open_labels": listen is not None}
    hub = Endpoint(0, binds, labels=labels[0], num_nodes=len(labels), **common, **settings)
    return [hub, *(Endpoint(n, dials=address, labels=labels[n], **common) for n in range(1, len(labels)))]


def ipc_folder() -> AbstractContextManager[Path]:
    """A temporary folder for Unix sockets, with mode 0700; removed at the end, also if this process is killed."""
    return temporary_folder(root_for_sockets(MAX_IPC_FOLDER))


def is_tcp(address: str) -> bool:
    return not address.startswith("ipc://") and address != ""


def check_tcp(flag: str, address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ConfigError."""
    found = TCP_ADDRESS.fullmatch(address)
    if not found or int(found[2]) > 65535 or (flag == "attach-to" and int(found[2]) == 0):
        raise ConfigError(flag, address, "is not tcp://HOST:PORT", "for instance tcp://127.0.0.1:50515")
    return found[1].strip("[]"), int(found[2])


def read_key(path: Path, make: bool = False) -> KeyPair:
    """Read the key pair of a key file; `make` it where there is none. Raises ConfigError as `read_private`."""
    secret = read_private(FLAG, path, COPY_IT, (lambda: zmq.curve_keypair()[1].decode() + "\n") if make else None)
    try:
        return KeyPair(zmq.curve_public(secret), secret)
    except (zmq.ZMQError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(FLAG, path, "holds no CURVE key of 40 characters", COPY_IT) from error
