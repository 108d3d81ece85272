"""Who may use a cluster: its token, the file that says where it is, and what its head is asked before a run starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from a3c_mp.cluster.environment import ClusterAddress, environment, foreign, versions
from a3c_mp.errors import ConfigError

HOME_VARIABLE = "A3C_MP_HOME"
LAST_PORT = 65535
CONNECT_SECONDS = 2.0
PROBE_SECONDS = 20.0
"""longest wait for the answer of a head; importing Ray takes a second of it"""
VERSIONS_KEY, KEY_NAMESPACE = b"versions", b"a3c_mp"
REFUSED = ("unauthenticated", "invalid authentication token", "authentication token is missing", "permission_denied")
"""what an error of Ray contains if the head refuses a token"""

# The probe's own source: it needs Ray, and a process of its own, because Ray reads the token once in each process.
PROBE = """
import json, sys
from ray._raylet import GcsClient, GcsClientOptions
from ray._private.state import state
try:
    client = GcsClient(address=sys.argv[1])
    found = client.internal_kv_get(b"versions", b"a3c_mp", timeout=5)
    state._initialize_global_state(GcsClientOptions.create(sys.argv[1], None, allow_cluster_id_nil=True,
                                                           fetch_cluster_id_if_nil=True))
    free = state.available_resources().get("CPU", 0)
    nodes = [{"address": node["NodeManagerAddress"], "cpus": node["Resources"].get("CPU", 0)}
             for node in state.node_table() if node["Alive"]]
    print(json.dumps({"versions": json.loads(found or b"{}"), "free_cpus": free, "nodes": nodes}))
except BaseException as error:
    print(json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}))
"""


def home() -> Path:
    """The folder of tokens and addresses, mode 0700. Raises ConfigError if it cannot be made, or others may use it."""
    folder = Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".a3c_mp")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise _unusable(folder, f"it cannot be made ({error.strerror})", "choose another") from error
    if mode & 0o077:
        raise _unusable(folder, "other users may use it", f"chmod 700 {folder}, or choose another")
    return folder


def _unusable(path: Path, why: str, fix: str) -> ConfigError:
    return ConfigError("folder", path, why, f"{fix} with the environment variable {HOME_VARIABLE}")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, from the first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def make_token(path: Path | None) -> Path:
    """Return the file of a cluster's token, made if there is none. Raises ConfigError as `check_token` does."""
    path = path or home() / "ray_token"
    if not path.exists():
        try:
            write_private(path, secrets.token_hex(32))
        except OSError as error:
            raise ConfigError("token-file", path, f"it cannot be made ({error.strerror})", "choose another") from error
    return check_token(path)


def check_token(path: Path | None) -> Path:
    """Return the file of a cluster's token. Raises ConfigError if it is missing, or others may read it."""
    path = path or home() / "ray_token"
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise ConfigError("token-file", path, why, "copy it from the machine of the cluster's head") from error
    if mode & 0o077:
        raise ConfigError("token-file", path, "other users may read it", f"chmod 600 {path}, or make a new one")
    if not text.strip():
        raise ConfigError("token-file", path, "it is empty", "copy it from the machine of the cluster's head")
    return path.absolute()


@contextmanager
def saved_address(cluster: ClusterAddress) -> Iterator[None]:
    """Keep a file in which `--address auto` finds the cluster of this machine's node; a later node may overwrite it.

    Raises ConfigError if it cannot be written.
    """
    path, content = home() / "ray_cluster.json", json.dumps(cluster._asdict())
    try:
        write_private(path, content)
    except OSError as error:
        raise _unusable(path.parent, f"it cannot be written ({error.strerror})", "choose another") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == content:
                path.unlink()


def _saved_address() -> ClusterAddress:
    return ClusterAddress(**json.loads((home() / "ray_cluster.json").read_text()))


def has_live_address() -> bool:
    """Whether the head of the saved cluster answers; one that was killed leaves its file."""
    try:
        host, _, port = _saved_address().address.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return True


def find_cluster(address: str, token_file: Path | None) -> ClusterAddress:
    """Return address and token of a cluster; `auto` is that of a node on this machine. Raises ConfigError."""
    if address != "auto":
        return ClusterAddress(address, str(check_token(token_file)))
    try:
        saved = _saved_address()
    except (OSError, ValueError, TypeError) as error:
        why, fix = "this machine has no node of a cluster", "python -m a3c_mp.cluster head, or join HOST:PORT"
        raise ConfigError("address", "auto", why, fix) from error
    return ClusterAddress(saved.address, str(check_token(token_file or Path(saved.token_file))))


class Head(NamedTuple):
    """What the head of a cluster says of it."""

    versions: Mapping[str, str]
    free_cpus: float
    nodes: list[dict[str, Any]]


def check_cluster(cluster: ClusterAddress, insecure: bool = False, num_actors: int = 0) -> Head:
    """Ask the head of a cluster, twice: with the token, and with a wrong one, which it must refuse.

    Args:
        cluster: address and token.
        insecure: accept a cluster that accepts any token.
        num_actors: that are to be started; one of them must find a place.

    Raises:
        ConfigError: it does not answer, refuses the token, accepts any, runs other versions, or has no place free.
    """
    address = cluster.address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > LAST_PORT:
        raise ConfigError("address", address, "must be HOST:PORT, or auto", "see python -m a3c_mp.cluster status")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        why = f"nothing answers there ({error.strerror or error})"
        raise ConfigError("address", address, why, "start it: python -m a3c_mp.cluster head") from error
    settings = environment(address, cluster.token_file)
    wrong = {key: value for key, value in settings.items() if key != "RAY_AUTH_TOKEN_PATH"}
    asked = _ask(address, settings), _ask(address, {**wrong, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    answer, answer_to_stranger = map(_answer, asked)
    if "error" not in answer_to_stranger and not insecure:
        fix = "start it with python -m a3c_mp.cluster head, or accept it with --insecure-cluster"
        raise ConfigError("address", address, "the cluster accepts any token: everybody can run code on it", fix)
    if "error" in answer:
        text = answer["error"]
        if _is_refusal(answer):
            fix = "copy the token file of its head, and give it as --token-file"
            raise ConfigError("address", address, f"the cluster refuses the token in {cluster.token_file}", fix)
        raise ConfigError(
            "address", address, f"the head does not answer ({text[:200]})", "is it the head of a cluster?"
        )
    if "error" in answer_to_stranger and not _is_refusal(answer_to_stranger) and not insecure:
        why = f"cannot tell whether the cluster checks tokens ({answer_to_stranger['error'][:200]})"
        raise ConfigError("address", address, why, "try again, or accept it with --insecure-cluster")
    own = versions()
    differing = [f"{name} {theirs}, here {own.get(name)}" for name, theirs in answer["versions"].items()
                 if theirs != own.get(name)]  # fmt: skip
    if differing:
        raise ConfigError("address", address, f"its head has {'; '.join(differing)}", "install the same versions")
    if num_actors and answer["free_cpus"] < 1:
        fix = "add a node (python -m a3c_mp.cluster join), or end other runs"
        raise ConfigError("num-actors", num_actors, f"the cluster at {address} has no CPU free", fix)
    return Head(**answer)


def _is_refusal(answer: Mapping[str, Any]) -> bool:
    return any(word in answer.get("error", "").lower() for word in REFUSED)


def _ask(address: str, settings: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROBE, address], env={**foreign(os.environ), **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def _answer(asked: subprocess.Popen) -> dict[str, Any]:
    try:
        lines = asked.communicate(timeout=PROBE_SECONDS)[0].splitlines()
        return json.loads(lines[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        asked.kill()
        asked.communicate()
        return {"error": f"no answer within {PROBE_SECONDS:.0f} s"}
