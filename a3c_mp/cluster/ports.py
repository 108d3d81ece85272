"""Where a node listens: its address, its ports, and who else may reach them.

Ray binds all of a node's ports on 127.0.0.1 alone, or on all addresses of the machine (`GrpcServer`, src/ray/rpc): it
has no setting for a single other one. A change to it was taken back (https://github.com/ray-project/ray/pull/60012).
"""

import argparse
import os
import socket

from a3c_mp.cluster.node import LOOPBACK_HOST
from a3c_mp.errors import ConfigError

SERVICES = (
    "node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port", "metrics-export-port",
)  # fmt: skip
"""options of `ray start`; the ports after theirs are those of processes"""
DASHBOARD = 8265  # Ray reserves it, though no dashboard runs
MORE_PROCESSES = 10  # parameter server, shards, trainer, and those that Ray keeps ready, besides two for each actor
ALL = "Ray listens on all addresses of this machine"


def check_host(host: str) -> str:
    """The IPv4 address of a host. Raises ConfigError unless it is one at which other nodes reach this machine."""
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:  # the latter: it is no name of a host
        why = f"it has no IPv4 address ({getattr(error, 'strerror', None) or error})"
        raise ConfigError("host", host, why, "give one of this machine") from error
    if address != LOOPBACK_HOST and address.startswith("127."):  # for these, too, it would open all addresses
        why = f"{ALL}, not on {address} alone: it can bind one of loopback, {LOOPBACK_HOST}"
        raise ConfigError("host", host, why, "leave --host out")
    if address == "0.0.0.0":
        raise ConfigError("host", host, "other nodes cannot connect to it", "give an address of this machine")
    check_port("host", host, address, 0, "give an address of this machine")
    return address


def check_port(what: str, given: object, host: str, port: int, fix: str) -> None:
    """Raise ConfigError, about what was given, unless a port can be bound."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(what, given, f"it cannot be bound ({error})", fix) from error


def port_options(args: argparse.Namespace) -> list[str]:
    """Options of `ray start` for a range of ports. Raises ConfigError if it is too small, or a port is taken."""
    if args.node_ports is None:
        return []
    first, last = args.node_ports
    needed = len(SERVICES) + 2 * (os.cpu_count() or 1 if args.num_cpus is None else args.num_cpus) + MORE_PROCESSES
    if last - first + 1 < needed or first < 1:
        raise ConfigError("node-ports", f"{first} {last}", f"this node needs {needed} ports", "give a larger range")
    for port, owner in ((vars(args).get("port"), "the head's own (--port)"), (DASHBOARD, "that of Ray's dashboard")):
        if port in range(first, last + 1):
            raise ConfigError("node-ports", f"{first} {last}", f"{port} is {owner}", "give a range without it")
    for port in range(first, last + 1):
        check_port("node-ports", port, "", port, "give a range of free ports")
    services = [f"--{name}={first + number}" for number, name in enumerate(SERVICES)]
    return [*services, f"--min-worker-port={first + len(SERVICES)}", f"--max-worker-port={last}"]


def open_ports(args: argparse.Namespace, host: str) -> str:
    """The line about a node that listens on more than its address."""
    ports = [str(args.port)] if "port" in args else []
    ports.append("{} to {}".format(*args.node_ports) if args.node_ports else "those of its choice (--node-ports)")
    return f"{ALL}, not on {host} alone: close TCP {' and '.join(ports)} to strangers by a firewall; see docs/ray.md"
