"""A model of a run: how many agent steps a second actors and a learner take together, as a closed queueing network."""

from __future__ import annotations

from collections.abc import Sequence


def throughput(demands: Sequence[float], servers: Sequence[int], customers: int) -> float:
    """Jobs per unit of time of a closed network in equilibrium (Gordon and Newell 1967), by Buzen's convolution (1973).

    Args:
        demands: mean time that a job needs of each station, in all its visits.
        servers: of each station; with as many as there are customers, no customer waits there.
        customers: jobs that are under way, at least 1.
    """
    scale = max(demand / count for demand, count in zip(demands, servers, strict=True))
    totals = [1.0] + [0.0] * customers  # G(0), G(1), ...
    for demand, count in zip(demands, servers, strict=True):
        weights = [1.0]
        for jobs in range(1, customers + 1):
            weights.append(weights[-1] * demand / scale / min(jobs, count))
        totals = [sum(totals[k] * weights[jobs - k] for k in range(jobs + 1)) for jobs in range(customers + 1)]
    return totals[-2] / totals[-1] / scale


def predict_sps(
    *, actors: int, cores: int, unroll_length: int, num_envs: int, step_ms: float, act_ms: float, gpu_ms: float,
    learner_ms: float, slots_per_actor: int = 1,
) -> float:  # fmt: skip
    """Agent steps a second of chapters whose actors send rollouts.

    A rollout is a job: an actor collects it on a core, the GPU runs its acting passes one after another with those of
    other actors, the learner learns from it. What the learner's kernels take from the actors' is not in the model.

    Args:
        cores: that actors can use.
        step_ms: an actor's time of one step of all its environments, without the acting pass.
        act_ms: time of one acting pass if no other process uses the GPU.
        gpu_ms: part of it that the GPU cannot give to two actors at once; 0 where they act on the CPU.
        learner_ms: the learner's time for one rollout.
    """
    collecting = unroll_length * (step_ms + act_ms - gpu_ms)
    demands = collecting, unroll_length * gpu_ms, learner_ms
    rate = throughput(demands, (min(actors, cores), 1, 1), actors * slots_per_actor)
    return 1000 * rate * unroll_length * num_envs
