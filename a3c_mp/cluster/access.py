"""Who may use a cluster: its token, the file that says where it is, and what its head is asked before a run starts."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from a3c_mp.cluster.node import ClusterAddress, Node, environment, foreign, labels
from a3c_mp.cluster.placement import ClusterState, Resources
from a3c_mp.errors import ConfigError
from a3c_mp.processes.private_files import check_private, read_private
from a3c_mp.processes.program import MUST_AGREE, differences

HOME_VARIABLE = "A3C_MP_HOME"
CONNECT_SECONDS, PROBE_SECONDS = 2.0, 20.0
MUST_AGREE_ON_RAY = {**MUST_AGREE, "ray": 9, "python": 2}
REFUSALS = ("unauthenticated", "authentication token", "permission_denied")  # words of Ray's errors

# It needs a process of its own, because Ray reads the token once in each process.
PROBE = """
import json, sys
from ray._raylet import GcsClient
try:
    head = GcsClient(address=sys.argv[1])
    usage = head.get_all_resource_usage(timeout=5).resource_usage_data.batch
    free = {node.node_id: dict(node.resources_available) for node in usage}
    nodes = [{"address": node.node_manager_address, "total": dict(node.resources_total),
              "free": free.get(node.node_id, {}), "versions": dict(node.labels)}
             for node in head.get_all_node_info(timeout=5).values() if node.state == 0]
    print(json.dumps({"nodes": nodes}))
except BaseException as error:
    print(json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}))
"""


def home() -> Path:
    """The folder of tokens and addresses, mode 0700. Raises ConfigError if it cannot be made, or others may use it."""
    fix = f"choose another with the environment variable {HOME_VARIABLE}"
    folder = Path(os.environ.get(HOME_VARIABLE) or Path("~/.a3c_mp"))
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except RuntimeError as error:  # no HOME, and a user without an entry in /etc/passwd
        raise ConfigError("folder", folder, "there is no home folder", fix) from error
    except OSError as error:
        raise ConfigError("folder", folder, f"it cannot be made ({error.strerror})", fix) from error
    return check_private("folder", folder, fix)


def find_token(path: Path | None, make: bool = False) -> Path:
    """Return the file of a cluster's token. Raises ConfigError if it is missing, or others may use it."""
    path = path or home() / "ray_token"
    make_token = partial(secrets.token_hex, 32) if make else None
    read_private("token-file", path, "copy it from the machine of the cluster's head", make_token)
    return path.absolute()


def save_address(cluster: ClusterAddress, node: Node) -> ClusterAddress:
    """Write the file in which `--address auto` finds the cluster of this machine's node, as long as that runs.

    That of another cluster stays where it answers. Returns the cluster that `auto` finds. Raises ConfigError.
    """
    if (saved := read_address()) and saved.address != cluster.address and is_open(saved.address):
        return saved
    try:
        (new := _address_file().with_suffix(f".{os.getpid()}")).write_text(json.dumps([str(node.folder), *cluster]))
        new.replace(_address_file())
    except OSError as error:
        fix = f"make room, or choose another with the environment variable {HOME_VARIABLE}"
        raise ConfigError("folder", home(), f"it cannot be written ({error.strerror})", fix) from error
    return cluster


def read_address() -> ClusterAddress | None:
    """The cluster of a node that runs on this machine."""
    with suppress(OSError, ValueError, TypeError):
        folder, *cluster = json.loads(_address_file().read_text())
        return ClusterAddress(*cluster) if Path(folder).exists() else None
    return None


def _address_file() -> Path:
    return home() / f"ray_cluster.{socket.gethostname()}.json"  # machines may share the home folder


def is_open(address: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, OverflowError):
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        return True
    return False


def find_cluster(address: str, token_file: Path | None, insecure: bool = False) -> ClusterAddress:
    """Return address and token of a cluster; `auto` is that of a node on this machine. Raises ConfigError.

    `insecure`: without a token.
    """
    saved = read_address() if address == "auto" or (token_file is None and not insecure) else None
    if address == "auto" and saved is None:
        why, fix = "this machine has no node of a cluster", "python -m a3c_mp.cluster head, or join HOST:PORT"
        raise ConfigError("address", "auto", why, fix)
    if saved is not None and address in ("auto", saved.address):
        address, token_file = saved.address, token_file or Path(saved.token_file)
    return ClusterAddress(address, "" if insecure else str(find_token(token_file)))


def check_cluster(cluster: ClusterAddress, needs: Resources | None = None) -> list[dict[str, Any]]:
    """Ask the head of a cluster, twice: with the token, and with a wrong one, which it must refuse if there is one.

    Returns its nodes. Raises ConfigError if it does not answer, refuses the token, accepts any, runs other versions, or
    has no place for one actor with such `needs`; prints a warning for versions that may differ, such as the commit.
    """
    refuse = partial(ConfigError, "address", cluster.address)
    if not is_open(cluster.address):
        raise refuse("nothing answers there", "give HOST:PORT of a head, or start one: python -m a3c_mp.cluster head")
    settings = environment(cluster)
    wrong = {**settings, "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # goes before the file
    try:
        with ThreadPoolExecutor() as pool:
            answer, to_stranger = pool.map(partial(_ask, cluster.address), (settings, wrong))
    except (OSError, RuntimeError) as error:
        why, fix = f"no process can be started that asks it ({error})", "raise the limit on processes (ulimit -u)"
        raise refuse(why, fix) from error
    if _is_refusal(answer):
        fix = "copy the token file of its head, and give it as --token-file"
        if not cluster.token_file:
            raise refuse("the cluster has a token", f"leave --insecure-cluster out; {fix}")
        raise refuse(f"the cluster refuses the token in {cluster.token_file}", fix)
    if "error" in answer:
        raise refuse(f"the head does not answer ({answer['error'][:200]})", "is it the head of a cluster?")
    if not _is_refusal(to_stranger) and cluster.token_file:
        why = "the cluster does not clearly refuse a wrong token: anyone may be able to run code on it"
        start = "start it with python -m a3c_mp.cluster head"
        raise refuse(why, f"{start}, or have train_ray.py --insecure-cluster use it")
    own = labels()
    for node in answer["nodes"]:
        known = {**own, **node["versions"]}  # a node that was started otherwise does not tell its versions
        fatal, harmless = differences(known, own, MUST_AGREE_ON_RAY)
        where = f"its node at {node['address']} has"
        if fatal:
            raise refuse(f"{where} {fatal}", "install the same versions")
        if harmless:
            print(f"warning: address={cluster.address}: {where} {harmless}", file=sys.stderr, flush=True)
    total, free = (dict(enumerate(node[what] for node in answer["nodes"])) for what in ("total", "free"))
    if needs and not (state := ClusterState({}, total, free)).has_place(needs):
        why = f"an actor needs {state.node_with(needs)}"
        raise refuse(why, "add a node (python -m a3c_mp.cluster join), or end other runs")
    return answer["nodes"]


def _is_refusal(answer: Mapping[str, Any]) -> bool:
    return any(words in answer.get("error", "").lower() for words in REFUSALS)


def _ask(address: str, settings: Mapping[str, str]) -> dict[str, Any]:
    command, env = [sys.executable, "-c", PROBE, address], {**foreign(os.environ), **settings}
    try:
        asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_SECONDS)
        return json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return {"error": f"no answer within {PROBE_SECONDS:.0f} s"}
