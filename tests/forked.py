"""Child processes that are forked from a server which has imported torch: milliseconds instead of two seconds each.

For tests of what processes do. How they are spawned, and that they end with their parent, is left to tests that start
whole scripts and to test_spawn.py. The server only imports, so it has no threads that a fork would lose.
"""

import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from a3c_mp.processes import spawn

IMPORTS = ["train_a3c_grad", "train_apex", "train_impala", "train_population", "train_task", "envs", "harness", "nodes"]
PATHS = [os.path.join(os.path.dirname(__file__), folder) for folder in ("..", "", "process")]


class ForkedProcess(ForkServerProcess):
    """Stands in for `GroupLeader` and `SpawnProcess` of a3c_mp.processes.spawn."""

    def __init__(self, *, target, args, **kwargs):
        super().__init__(target=run, args=(dict(os.environ), target, args), **kwargs)


def run(environ, target, args):
    """Entry point of a forked process: set its environment, and let it outlive its parent, the server."""
    os.environ.clear()
    os.environ.update(environ)
    spawn.end_with_parent = lambda pid: None
    target(*args)


def fork_children(monkeypatch):
    """Have `start_child` fork from the server, which is started if there is none."""
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
        forkserver.set_forkserver_preload(IMPORTS)
        forkserver.ensure_running()
    for name in ("GroupLeader", "SpawnProcess"):
        monkeypatch.setattr(spawn, name, ForkedProcess)
