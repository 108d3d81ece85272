"""Nodes of a Ray cluster, closed to strangers: python -m a3c_mp.cluster head | join HOST:PORT | status

head starts the first node, and makes a token; join adds a node of another machine, which needs a copy of the token
file; both run until Ctrl-C. status lists the nodes. Then: python train_ray.py --address auto
"""

import argparse
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TextIO

from a3c_mp._bootstrap import IGNORED_AT_START
from a3c_mp.cluster.access import check_cluster, find_cluster, find_token, read_address, save_address
from a3c_mp.cluster.node import LOOPBACK_HOST, ClusterAddress, Node, check_installed, environment
from a3c_mp.cluster.ports import check_host, check_port, open_ports, port_options
from a3c_mp.errors import ConfigError
from a3c_mp.processes.console import GONE, discard_output
from a3c_mp.processes.interfaces import address_towards
from a3c_mp.processes.spawn import SIGNALS

PORT = 6399
POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0  # longest time from a signal to the end of a node that is used
HEADLESS_SECONDS = 300  # after which a node ends whose head is gone: a trainer on it has saved its state by then
REACHED_SECONDS = 60.0  # after which the head must have reached a node, or given it up


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m a3c_mp.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for run in (head, join, status):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("--token-file", type=Path, help="the cluster's secret; default: ray_token in ~/.a3c_mp")
        if run is not status:
            command.add_argument("--num-cpus", type=number, help="places for actors; default: this machine's cores")
            command.add_argument("--num-gpus", type=number, help="GPUs for actors; default: this machine's")
            default = "loopback only" if run is head else "that from which it connects to the head"
            command.add_argument("--host", help=f"address of this machine for other nodes; default: {default}")
            what = "ports of this node, for a firewall; default: any"
            command.add_argument("--node-ports", type=int, nargs=2, metavar=("FIRST", "LAST"), help=what)
    commands.choices["head"].add_argument("--port", type=int, default=PORT, help=f"of the head; default: {PORT}")
    commands.choices["join"].add_argument("address", help="HOST:PORT of the head")
    commands.choices["status"].add_argument("address", nargs="?", default="auto", help="HOST:PORT of the head, or auto")
    args = parser.parse_args()
    try:
        check_installed()
        return args.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def number(text: str) -> int:
    """A number of CPUs or GPUs."""
    if (found := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return found


def head(args: argparse.Namespace) -> int:
    """Run the first node of a cluster."""
    host = check_host(args.host or LOOPBACK_HOST)
    cluster = ClusterAddress(f"{host}:{args.port}", str(find_token(args.token_file, make=True)))
    check_port("port", cluster.address, host, args.port, "choose another --port, or --host")
    text = f"head of a cluster at ADDRESS; its token is in {cluster.token_file}\n"
    if host == LOOPBACK_HOST:
        text += "start it with --host HOST if other machines are to join"
    else:
        text += "on other machines: python -m a3c_mp.cluster join ADDRESS --token-file FILE"
    return run_node(args, cluster, host, ["--head", f"--port={args.port}", "--include-dashboard=false"], text)


def join(args: argparse.Namespace) -> int:
    """Run a node that joins a cluster."""
    cluster = find_cluster(args.address, args.token_file)
    check_cluster(cluster)
    host = check_host(args.host) if args.host else address_towards(cluster.address.rpartition(":")[0])
    return run_node(args, cluster, host, [f"--address={cluster.address}"], "joined the cluster at ADDRESS")


def status(args: argparse.Namespace) -> int:
    cluster = find_cluster(args.address, args.token_file)
    nodes = check_cluster(cluster)
    free = sum(node["free"].get("CPU", 0) for node in nodes)
    plural = "" if len(nodes) == 1 else "s"
    print(f"{cluster.address}: {len(nodes)} node{plural}, {free:g} places for actors free")
    for node in nodes:
        places, gpus = (node["total"].get(name, 0) for name in ("CPU", "GPU"))
        print(f"  {node['address']}  {places:g} places, {gpus:g} GPUs")
    return 0


def run_node(args: argparse.Namespace, cluster: ClusterAddress, host: str, options: list[str], text: str) -> int:
    """Run a node until a signal (0), or until one of its main processes ends (1).

    `text` says that it has started, at the ADDRESS that it tells: of port 0 another one was chosen.
    """
    for signum in {*SIGNALS} - IGNORED_AT_START:  # nohup ignores SIGHUP
        signal.signal(signum, lambda *_: sys.exit(0))
    given = {"num-cpus": args.num_cpus, "num-gpus": args.num_gpus}
    sizes = [f"--{name}={size}" for name, size in given.items() if size is not None]
    options += [f"--node-ip-address={host}", *sizes, *port_options(args)]
    settings = {**environment(cluster), "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEADLESS_SECONDS)}
    with closing(Node(options, settings)) as node:
        address = node.wait_for_start()
        cluster = cluster._replace(address=address) if cluster.address.endswith(":0") else cluster
        text = text.replace("ADDRESS", cluster.address)
        started, found = time.monotonic(), save_address(cluster, node)
        if found != cluster:
            text += f"\n--address auto stays the one at {found.address}: give this one with --address"
        try:
            say(text, sys.stdout)
            if host != LOOPBACK_HOST:
                say(f"warning: {open_ports(args, host)}", sys.stderr)
            while not node.has_ended(seconds=1.0):
                with suppress(ConfigError):
                    if read_address() is None:  # the node that `auto` found has ended
                        save_address(cluster, node)
            if node.was_given_up() and time.monotonic() - started < REACHED_SECONDS:
                fix = "let a firewall pass its ports (--node-ports), or give another --host; see docs/ray.md"
                raise ConfigError("host", host, "the head cannot connect to this node there and has given it up", fix)
            say(f"the node has failed; it ends in {GRACE_SECONDS:.0f} s", sys.stderr)
            time.sleep(GRACE_SECONDS)
            return 1
        except SystemExit:
            wait_for_runs(node)
    return 0


def say(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError as error:  # the node must not end because of it
        if error.errno in GONE:  # its reader or terminal
            discard_output(stream)


def wait_for_runs(node: Node) -> None:
    """Give runs time to save their state: Ray ends them at once when their node ends."""
    deadline = time.monotonic() + GRACE_SECONDS
    if node.is_used():
        text = f"a run uses this node: stop it; the node ends in {GRACE_SECONDS:.0f} s, or at a second signal"
        say(text, sys.stderr)
    while node.is_used() and time.monotonic() < deadline:  # a second signal raises SystemExit
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
