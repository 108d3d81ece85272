"""Ray clusters: sessions, fleets of actors, a parameter server, replay shards. Only this folder imports ray."""

from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.learners import RayLearners
from a3c_mp.cluster.parameters import Publisher
from a3c_mp.cluster.ray_worker import Packer
from a3c_mp.cluster.remote_replay import Outbox, RemoteReplay, ReplayShard, ReplaySpec
from a3c_mp.cluster.session import Session

__all__ = [
    "Fleet",
    "Outbox",
    "Packer",
    "Publisher",
    "RayLearners",
    "RemoteReplay",
    "ReplayShard",
    "ReplaySpec",
    "Session",
]
