"""Prioritized experience replay: each actor writes to a shard of its own, the learner samples from all as one."""

from a3c_mp.replay.replay import Batch, Prefetch, Replay, importance_weights
from a3c_mp.replay.shards import Shards
from a3c_mp.replay.writer import EnvStep, Writer, writer_state_spec

__all__ = ["Batch", "EnvStep", "Prefetch", "Replay", "Shards", "Writer", "importance_weights", "writer_state_spec"]
