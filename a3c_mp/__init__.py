"""a3c-mp: a distributed deep-RL trainer for one machine, written to be read."""

from a3c_mp import _bootstrap  # noqa: F401  (sets up the process; must come before torch)

__version__ = "0.1.0"
