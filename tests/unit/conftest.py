"""One OpenMP thread, as in every process of a run: two that wait for each other on busy cores cost seconds a test."""

import a3c_mp  # noqa: F401 - sets OMP_NUM_THREADS, which counts only before torch is imported
