"""Prioritized experience replay in shards: each actor writes to its own, the learner samples from all of them as one.

memory = Shards(num_actors, num_envs, rows, obs_space, action_space, stack)  # parent, before the actors start
writer = Writer(memory, channel.worker, n_step, gamma)                       # actor
replay = Replay(memory, priority_exponent, seed)                             # learner
with Prefetch(replay, batch_size, ahead=2) as batches:
    batch = batches.next()
"""

from a3c_mp.replay.replay import Batch, Prefetch, Replay, importance_weights
from a3c_mp.replay.shards import Shards
from a3c_mp.replay.writer import EnvStep, Writer, writer_state_spec

__all__ = ["Batch", "EnvStep", "Prefetch", "Replay", "Shards", "Writer", "importance_weights", "writer_state_spec"]
