"""Ray clusters: sessions, fleets of actors, a parameter server, replay shards. Only this folder imports ray."""

from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.ray_worker import FleetChannel, Packer, Result
from a3c_mp.cluster.remote_replay import RemoteReplay
from a3c_mp.cluster.session import Session
from a3c_mp.cluster.shards import Outbox, ReplayShard, ReplaySpec, Rows, all_finite
from a3c_mp.processes.pool import Token

__all__ = [
    "Fleet", "FleetChannel", "Outbox", "Packer", "Publisher", "Reader", "RemoteReplay", "ReplayShard", "ReplaySpec",
    "Result", "Rows", "Session", "Token", "all_finite",
]  # fmt: skip
