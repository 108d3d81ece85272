"""a3c-mp: a distributed deep-RL trainer for one machine, written to be read.

Parallelism here comes from processes; threads inside them would fight over the same cores. OpenMP reads its thread
count once, when it loads, so it is set here, in the environment that every spawned process inherits. The learner asks
torch for its `--learner-threads` explicitly.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; what --deterministic needs there

__version__ = "0.1.0"
