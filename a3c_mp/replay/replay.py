"""The learner's end of the replay: prioritized sampling from all shards at once, and ahead of time on a thread."""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from a3c_mp.errors import ConfigError
from a3c_mp.processes.memory_order import publish_counters, read_counters
from a3c_mp.processes.slots import page_locked
from a3c_mp.replay.shards import Shards, spread
from a3c_mp.replay.sum_tree import SumTree
from a3c_mp.replay.writer import MIN_PRIORITY


class Batch(NamedTuple):
    """N sampled transitions, on the CPU. A batch from `Prefetch.next` is valid until the next call."""

    obs: Tensor  # [N, *obs_shape] uint8 for images, float32 otherwise
    action: Tensor  # [N] int64, or [N, A] float32
    reward: Tensor  # [N] float32, sum of the m <= n discounted rewards, clipped, not scaled
    discount: Tensor  # [N] float32, gamma^m; 0 where the return ended by termination or a lost life
    next_obs: Tensor  # [N, *obs_shape], m steps later; where discount is 0 it is `obs` again, unused
    next_mask: Tensor  # [N, A] bool, actions allowed at `next_obs`; [N, 0] if all are always allowed
    probability: Tensor  # [N] float64, P(i) = p_i^alpha / sum over all shards of this learner, when it was drawn
    ids: Tensor  # [N] int64, for `Replay.update`

    @classmethod
    def empty(cls, shards: Shards, batch_size: int, pin: bool = False) -> Self:
        """Allocate a batch for `Replay.sample` to fill, page-locked if `pin`."""
        # From the spec of rows in their lanes: views of them would take as long as the sampling.
        rows = {name: (shape[2:], dtype) for name, (shape, dtype) in shards.slots.spec.items()}
        frame, dtype = rows["frame"]
        obs = (shards.stack, *frame) if shards.stack > 1 else frame, dtype
        transition = obs, rows["action"], rows["reward"], rows["discount"], obs, rows["mask"]
        fields = *transition, ((), torch.float64), ((), torch.int64)
        batch = cls(*(torch.empty(batch_size, *shape, dtype=dtype) for shape, dtype in fields))
        return cls(*map(page_locked, batch)) if pin else batch

    def to(self, device: torch.device) -> Self:
        """The batch on a device, its ids on the CPU; from pinned memory to a GPU nothing waits for the copies."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self._fields if name != "ids"}
        return self._replace(**moved)


def importance_weights(probability: Tensor, importance_exponent: float, smallest: Tensor | None = None) -> Tensor:
    """Importance-sampling weights (N P(i))^-beta over the largest of the batch (Schaul et al. 2016, section 3.4).

    They are [N] float32 in (0, 1]; the replay's size cancels, and beta = 1 corrects in full. `smallest` [] is the
    smallest P(i) of the whole batch, if `probability` [N] float64 is only a part of it.
    """
    return (probability / (probability.min() if smallest is None else smallest)).pow(-importance_exponent).float()


class Replay:
    """Prioritized experience replay over all shards. Actors write first priorities; the learner owns them from then on.

    Every method may be called while writers write, and while another thread of this process is in `sample`. With a
    `priority_exponent` (alpha) of 0 it samples uniformly.
    """

    def __init__(self, shards: Shards, priority_exponent: float, seed: int):
        self.shards, self.priority_exponent = shards, priority_exponent
        self.sizes = [shards.num_shards, shards.num_envs, shards.rows, shards.stack]  # as checkpoints have them
        self.fields = {name: field.flatten(0, 1) for name, field in shards.fields().items()}  # [lanes * rows, ...]
        self.rng = np.random.default_rng(seed)
        # Of p^alpha; row r of a lane is leaf lane * rows + r % rows.
        self.tree = SumTree(shards.num_lanes * shards.rows)
        self.seen, self.written = np.zeros((2, shards.num_lanes), np.int64)  # `committed`, `written` at last `ingest`
        self.tail = np.zeros(shards.num_lanes, np.int64)  # rows below it are retired
        self.size = 0  # transitions that can be drawn
        self.dropped = 0  # priority updates for transitions already retired, since the start
        self.rejected = 0  # transitions left out in this process: their first priority was not finite
        self._lock = threading.Lock()  # guards the tree and the counters; gathering needs no lock

    def ingest(self, shard: int) -> int:
        """Make what the shard's writer has committed since the last call available to `sample`; return how many.

        In a deterministic run the writer must be idle.
        """
        lanes = self.shards.lanes(shard)
        with self._lock:
            committed = read_counters(self.shards.committed[lanes])  # before the rows below it
            self.written[lanes] = self.shards.written[lanes]
            lane, row = spread(np.maximum(self.seen[lanes], self.tail[lanes]), committed, lanes.start)
            self.seen[lanes] = committed
            priority = self.shards.priority[lane, row % self.shards.rows]
            usable = (priority >= 0) & (priority < np.inf)  # false for NaN too
            priority = np.where(usable, priority, 0.0)  # what is not finite in a transition shows in its TD error
            self.rejected += int(np.count_nonzero(~usable))
            self._set(lane, row, priority)
            new = int(np.count_nonzero(priority))
            self.size += new
        return new

    def make_room(self, shard: int, rows: int) -> None:
        """Retire the oldest transitions, so that the writer can append `rows` more rows to each lane.

        A step of the environments appends one row, or two if it truncates: `rows` must be 2 K for each block of K steps
        that the writer has tokens for. Call it before each token, and again before a writer is replaced: rows that
        the dead writer left come on top.
        """
        shards, lanes = self.shards, self.shards.lanes(shard)
        assert rows + shards.stack < shards.rows, f"no {rows} free rows in lanes of {shards.rows}"
        with self._lock:
            free_from = shards.written[lanes] + rows - shards.rows  # rows below it may be overwritten
            tail = np.maximum(self.tail[lanes], free_from + shards.stack - 1)  # also the stacks that include them
            lane, row = spread(self.tail[lanes], np.minimum(tail, self.seen[lanes]), lanes.start)
            self.size -= int(np.count_nonzero(self.tree[self._leaf(lane, row)]))
            self._set(lane, row, np.zeros(len(row)))
            self.tail[lanes] = tail
            publish_counters(until := shards.writable_until[lanes], np.maximum(until, free_from + shards.rows))

    def roll_back(self, shard: int) -> None:
        """Discard what a dead writer has written since the last `ingest`; its successor writes it again.

        Only if the writer was idle at that `ingest` and its state was saved then (see `Writer.fields`).
        """
        lanes = self.shards.lanes(shard)
        self.shards.written[lanes], self.shards.committed[lanes] = self.written[lanes], self.seen[lanes]

    def sample(self, batch_size: int, out: Batch | None = None) -> Batch:
        """Sample transitions in proportion to p^alpha, stratified: one from each of N equal parts of the sum.

        They fill `out`, a batch from `Batch.empty`, or new memory. Raises ValueError if the replay is empty.
        """
        out = Batch.empty(self.shards, batch_size) if out is None else out
        strata = np.arange(batch_size) + self.rng.random(batch_size)
        lane, row = self._fill(out, strata / batch_size)
        # Meanwhile another thread may have retired rows that were read here, and an actor may have overwritten them.
        while len(late := np.flatnonzero(row < read_counters(self.tail)[lane])):
            others = Batch.empty(self.shards, len(late))
            lane[late], row[late] = self._fill(others, self.rng.random(len(late)))
            for field, other in zip(out, others, strict=True):
                field[torch.from_numpy(late)] = other
        return out

    def _fill(self, out: Batch, fractions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find and gather the transitions at these fractions of the priority sum; returns (lane, row), both [N]."""
        rows = self.shards.rows
        with self._lock:
            total = self.tree.total
            leaf = self.tree.find(fractions * total)
            out.probability.copy_(torch.from_numpy(self.tree[leaf] / total))
            lane, place = np.divmod(leaf, rows)
            row = self.tail[lane] + (place - self.tail[lane]) % rows
        out.ids.copy_(torch.from_numpy(row * self.shards.num_lanes + lane))
        at = torch.from_numpy(leaf)
        for name in ("action", "reward", "discount"):
            torch.index_select(self.fields[name], 0, at, out=getattr(out, name))
        self.shards.gather(lane, place, out.obs)
        next_place = place + self.fields["bootstrap_offset"][at].numpy()
        self.shards.gather(lane, next_place, out.next_obs)
        if out.next_mask.shape[1]:
            next_leaf = torch.from_numpy(lane * rows + next_place % rows)
            torch.index_select(self.fields["mask"], 0, next_leaf, out=out.next_mask)
        return lane, row

    def extend(self, batch: Batch, n_step: int, gamma: float) -> Batch:
        """Make n-step transitions, in place, of a batch that was stored with n = 1 and without a discount factor.

        A return ends early at the end of its game, and before what cannot be sampled. Writers have to be idle.
        """
        shards, (row, lane) = self.shards, np.divmod(batch.ids.numpy(), self.shards.num_lanes)
        reward, discount = batch.reward.numpy(), batch.discount.numpy()
        discount *= gamma
        goes_on, offset = discount > 0, np.zeros(len(row), np.int64)
        for i in range(1, n_step):
            leaf = self._leaf(lane, row + i)
            goes_on &= self.tree[leaf] > 0
            reward += np.where(goes_on, discount * shards.reward.ravel()[leaf], 0)
            discount *= np.where(goes_on, gamma * shards.discount.ravel()[leaf], 1)
            offset += np.where(goes_on, shards.bootstrap_offset.ravel()[leaf], 0)
            goes_on &= discount > 0
        if len(longer := np.flatnonzero(offset)):
            lane, place = lane[longer], (row[longer] + offset[longer] + 1) % shards.rows
            shards.gather(lane, place, obs := batch.next_obs[longer])
            batch.next_obs[longer] = obs
            if batch.next_mask.shape[1]:
                batch.next_mask[longer] = self.fields["mask"][lane * shards.rows + place]
        return batch

    def update(self, ids: Tensor, priorities: Tensor | np.ndarray) -> None:
        """Set the priorities of sampled transitions: absolute TD errors [N], finite, without exponent.

        Transitions that were retired meanwhile are skipped, and counted in `dropped`: newer ones may have their rows.
        """
        values = torch.as_tensor(priorities).detach().double().cpu().numpy()
        assert ((values >= 0) & (values < np.inf)).all(), values
        row, lane = np.divmod(ids.numpy(), self.shards.num_lanes)
        with self._lock:
            alive = row >= self.tail[lane]
            self._set(lane[alive], row[alive], values[alive] + MIN_PRIORITY)
            self.dropped += int(np.count_nonzero(~alive))

    def _leaf(self, lane: np.ndarray, row: np.ndarray) -> np.ndarray:
        return lane * self.shards.rows + row % self.shards.rows

    def _set(self, lane: np.ndarray, row: np.ndarray, priority: np.ndarray) -> None:
        self.tree[self._leaf(lane, row)] = priority.astype(np.float64) ** self.priority_exponent * (priority > 0)

    def state_dict(self) -> dict[str, Any]:
        """Contents and counters, as tensors and plain values for `torch.load(weights_only=True)`.

        Once lanes are half full, the frames are a view of live memory, not a copy: do not call `make_room` before they
        are saved.
        """
        with self._lock:
            shards, used = self.shards, int(self.written.max())
            used = used if used < shards.rows // 2 else shards.rows
            fields = {name: field[:, :used] for name, field in shards.fields().items()}
            leaves = self.tree.leaves.reshape(shards.num_lanes, shards.rows)
            return {
                "sizes": self.sizes,
                "frame": fields.pop("frame").contiguous(),
                "fields": {name: field.clone() for name, field in fields.items()},
                "leaves": torch.from_numpy(leaves[:, :used].copy()),
                "priority_exponent": self.priority_exponent,
                **{name: torch.from_numpy(getattr(self, name).copy()) for name in ("seen", "written", "tail")},
                "rng": self.rng.bit_generator.state,
                "dropped": self.dropped,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of equal sizes, else ConfigError; priorities get the exponent of this replay."""
        if state["sizes"] != self.sizes:
            sizes = f"(shards, environments, rows, stack) {state['sizes']}, this one {self.sizes}"
            fix = "leave the flags for its sizes out; --no-save-replay resumes with an empty one"
            raise ConfigError("resume", "", f"the saved replay has {sizes}", fix)
        shards, saved, exponent = self.shards, state["leaves"].numpy(), state["priority_exponent"]
        used = saved.shape[1]
        for name, field in {"frame": state["frame"], **state["fields"]}.items():
            shards.fields()[name][:, :used] = field
        for name in ("seen", "written", "tail"):
            getattr(self, name)[:] = state[name].numpy()
        shards.written[:], shards.committed[:] = self.written, self.seen
        shards.writable_until[:] = np.maximum(self.written, shards.rows)
        if exponent not in (0, self.priority_exponent):
            saved = np.where(saved > 0, saved ** (self.priority_exponent / exponent), 0.0)
        self.tree[self._leaf(*np.indices(saved.shape)).ravel()] = saved.ravel()
        self.size = int(np.count_nonzero(self.tree.leaves))
        self.rng.bit_generator.state = state["rng"]
        self.dropped = state["dropped"]


class Prefetch(AbstractContextManager["Prefetch"]):
    """Samples batches ahead on a thread; use it in a `with` block.

    With `ahead` 0 it samples on demand, without a thread (deterministic runs); `pin` page-locks batches for a GPU.
    """

    def __init__(self, replay: Replay, batch_size: int, ahead: int, pin: bool = False):
        self.replay, self.batch_size, self.ahead = replay, batch_size, ahead
        self._held, *self._free = (Batch.empty(replay.shards, batch_size, pin) for _ in range(ahead + 1))
        self._thread = ThreadPoolExecutor(1, "prefetch")  # it starts with the first batch
        self._batches: deque[Future[Batch]] = deque()

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> Batch:
        """The next batch; its memory is reused after the next call. Raises whatever `Replay.sample` raised."""
        if self.ahead == 0:
            return self.replay.sample(self.batch_size, self._held)
        for batch in (*self._free, self._held):
            self._batches.append(self._thread.submit(self.replay.sample, self.batch_size, batch))
        self._free.clear()
        self._held = self._batches.popleft().result()
        return self._held
