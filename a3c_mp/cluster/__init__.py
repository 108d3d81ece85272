"""Ray clusters: sessions, fleets of actors, a parameter server, replay shards. Only this folder imports ray."""
# ruff: noqa: F401  (names for others)

from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.learners import RayLearners
from a3c_mp.cluster.parameters import Publisher
from a3c_mp.cluster.ray_worker import Packer
from a3c_mp.cluster.remote_replay import Outbox, RemoteReplay, ReplayShard, ReplaySpec
from a3c_mp.cluster.session import Session
