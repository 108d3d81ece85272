"""a3c-mp: distributed deep reinforcement learning: A3C, Ape-X (DQN, DDPG), IMPALA, and tasks of middleware."""

from a3c_mp import _bootstrap  # noqa: F401  (sets up the process; must come before torch)

__version__ = "0.2.0"
