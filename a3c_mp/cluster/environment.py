"""Ray on this machine: its version, the environment variables of its processes, and where a running cluster is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from typing import NamedTuple

import a3c_mp
from a3c_mp.errors import ConfigError

RAY_VERSION = "2.60.0"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # where it is over, Ray exits the process, without `finally`
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # a wrong token is refused after 1 s instead of 20 s
    "RAY_health_check_period_ms": "1000",  # of nodes by the head: one that is gone refuses at once, a busy one has 10 s
    "RAY_health_check_failure_threshold": "2",
    "RAY_LOG_MONITOR_MAX_OPEN_FILES": "10",  # its log monitor keeps two files of each process that was killed open
    "RAY_AUTH_MODE": "token",
}
"""environment variables that Ray reads when it is imported, and that its processes inherit"""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""keeps all of Ray on 127.0.0.1 (so it does on Windows and macOS); also read at the import"""
LOOPBACK_HOST = "127.0.0.1"


class ClusterAddress(NamedTuple):
    """Where a running cluster is, and the file of its token."""

    address: str  # HOST:PORT of its head
    token_file: str


def foreign(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those that Ray reads, but for the ones of its TLS, which are the user's choice."""
    kept = "RAY_USE_TLS", "RAY_TLS_"
    return {name: value for name, value in variables.items() if not name.startswith("RAY_") or name.startswith(kept)}


def environment(cluster: ClusterAddress) -> dict[str, str]:
    """Variables of a process that starts or joins a cluster."""
    local = LOOPBACK if cluster.address.rpartition(":")[0] in (LOOPBACK_HOST, "localhost") else {}
    return {**ENVIRONMENT, **local, "RAY_AUTH_TOKEN_PATH": cluster.token_file}


def check_installed() -> None:
    """Raise ConfigError if ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "none", "it is not installed", f'pip install "ray=={RAY_VERSION}"')


def versions() -> dict[str, str]:
    """Versions that must be the same on every node, which has them as labels: a label contains no plus sign."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "gymnasium", "ray")}
    own = {"python": platform.python_version(), "a3c_mp": a3c_mp.__version__}
    return {name: version.replace("+", "-") for name, version in {**own, **packages}.items()}
