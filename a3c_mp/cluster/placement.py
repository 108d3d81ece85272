"""Where Ray starts actors: what each needs of a node, which node is taken first, and what is said where none has it."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

Resources = Mapping[str, float]  # Ray's name of a resource (CPU, GPU, memory) -> amount
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
GIB = 2**30


class ClusterState(NamedTuple):
    """A cluster, as its head describes it."""

    nodes: Mapping[str, str] = {}  # ids of the nodes that are alive -> their addresses, the trainer's first
    total: Mapping[Any, Resources] = {}  # their ids -> resources
    free: Mapping[Any, dict[str, float]] = {}  # the same of what is not in use
    waiting: frozenset[str] = frozenset()  # ids of the actors that no node has a place for, or that are starting

    def sums(self, name: str) -> list[float]:
        """How much of a resource is not in use, and how much there is, on all nodes."""
        return [sum(node.get(name, 0.0) for node in nodes.values()) for nodes in (self.free, self.total)]

    def has_place(self, needs: Resources, refused: Collection[str] = ()) -> bool:
        """Whether a node has so much free, other than those that are refused."""
        return any(fits(needs, found) for node, found in self.free.items() if node not in refused)

    def node_with(self, needs: Resources) -> str:
        """What something needs of a node, and what the nodes have, of which none has so much free."""
        wanted = {name: amount for name, amount in needs.items() if amount}
        text = f"a node with {' and '.join(amount_of(*each) for each in wanted.items())} free; "
        text += f"{' and '.join(amount_of(name, *self.sums(name)) for name in wanted)} are free"
        text += f" on {len(self.total)} {'node' if len(self.total) == 1 else 'nodes'}"
        return text if any(fits(needs, node) for node in self.total.values()) else f"{text}, none of which has so much"


def fits(needs: Resources, found: Resources) -> bool:
    return all(found.get(name, 0.0) >= amount for name, amount in needs.items())


def amount_of(name: str, *amounts: float) -> str:
    """An amount of a resource in words, or a part of it: 0.5 GPU, 0 of 2 GPUs, 1.5 of 7 GiB of memory."""
    if name == "memory":
        return f"{' of '.join(f'{amount / GIB:.2g}' for amount in amounts)} GiB of memory"
    return f"{' of '.join(f'{amount:g}' for amount in amounts)} {name}{'s' if amounts[-1] > 1 else ''}"


def choose(order: str, needs: Resources, free: Mapping[str, dict[str, float]]) -> dict[str, Any]:
    """Options of Ray for an actor: what it needs, and its node: `spread`, `pack` (the first where it fits), or `auto`.

    What it takes of that node is subtracted from `free`. Where somebody else was faster, Ray takes another node.
    """
    options: dict[str, Any] = {"num_cpus": 0, **{OPTIONS[name]: round(amount, 4) for name, amount in needs.items()}}
    node = next((node for node, found in free.items() if fits(needs, found)), None)
    if order == "spread":
        options["scheduling_strategy"] = "SPREAD"
    elif order == "pack" and node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        free[node].update({name: round(free[node].get(name, 0.0) - amount, 4) for name, amount in needs.items()})
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    return options
