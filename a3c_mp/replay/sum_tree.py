"""Sum tree for prioritized sampling, vectorised: batches of searches and updates in a few numpy calls a level."""

import numpy as np

FANOUT = 16  # children of a node: more of them mean fewer levels but longer sums
TOP = 4096  # largest number of nodes of the top level, whose running sums are computed again in every search


class SumTree:
    """Sum tree over `capacity` non-negative numbers: set leaves and find them by running sum in O(log capacity).

    All are 0 at first. Each update sums the children of a changed node again, so rounding errors do not accumulate.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        parents = -(-capacity // FANOUT)
        self.levels = [np.zeros(parents * FANOUT)]  # the leaves first
        while len(self.levels[-1]) > TOP:
            parents = -(-parents // FANOUT)
            self.levels.append(np.zeros(parents * FANOUT))

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    @property
    def leaves(self) -> np.ndarray:
        """[capacity], read-only."""
        return self.levels[0][: self.capacity]

    def __getitem__(self, leaves: np.ndarray) -> np.ndarray:
        return self.levels[0][leaves]

    def __setitem__(self, leaves: np.ndarray, values: np.ndarray | float) -> None:
        """Set leaves [M]; where one occurs twice, the last value counts."""
        self.levels[0][leaves] = values
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            children, leaves = below.reshape(-1, FANOUT), leaves // FANOUT
            if len(leaves) < len(children):  # several may share a parent: to sum it twice costs less than to sort
                level[leaves] = children.take(leaves, axis=0).sum(axis=1)
            else:
                level[: len(children)] = children.sum(axis=1)

    def find(self, sums: np.ndarray) -> np.ndarray:
        """The leaf under each running sum in [0, total), [M] float64 -> [M] int64; never one that is 0.

        It is the leaf i with sum(leaves[:i]) <= running sum < sum(leaves[:i + 1]). Raises ValueError if all are 0.
        """
        # cumsum adds in order: a node of 0 has the same edge as the one before it, so it is never found.
        edges = self.levels[-1].cumsum()
        if edges[-1] == 0.0:
            raise ValueError("all leaves are 0: nothing can be found")
        sums = np.minimum(sums, np.nextafter(edges[-1], 0.0))
        node = edges.searchsorted(sums, side="right")
        sums = sums - np.where(node > 0, edges[node - 1], 0.0)
        for level in reversed(self.levels[:-1]):
            edges = level.reshape(-1, FANOUT).take(node, axis=0).cumsum(axis=1)
            # A parent's sum may differ from its children's last edge by a rounding error.
            sums = np.minimum(sums, np.nextafter(edges[:, -1], 0.0))
            child = (edges > sums[:, None]).argmax(axis=1)
            sums = sums - np.where(child > 0, edges[np.arange(len(node)), child - 1], 0.0)
            node = node * FANOUT + child
        return node
