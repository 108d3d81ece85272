"""A learner's gradient step on a GPU as one CUDA graph, instead of 150 launches and more."""

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics, with_diagnostics
from a3c_mp.run.gpu import cause_of
from a3c_mp.run.progress import count

MOST_GRAPHS = 32  # for more shapes of batches they are captured again, so that no memory runs out


class GraphStep:
    """Takes a learner's steps: loss, backward pass, clipping, check for NaN and inf, Adam, sums for the metrics.

    The first step with batches of a shape is launched kernel by kernel, so that libraries choose their algorithms. The
    second is captured as a graph, which computes with what its memory holds then. What changes is copied there before
    each launch: tensors and numbers of the batch, learning rates, and settings that differ from those at the start. A
    capture makes constants of all other numbers.

    Nothing waits for the GPU: it skips steps with NaN or inf by itself, and `settle` counts them later.
    """

    def __init__(self, learner: Any):
        self.learner, self.device, self.optimizer = learner, learner.device, learner.optimizer
        self.stream = torch.cuda.Stream(self.device)  # of captures
        self.graphs: dict[Any, Any] = {}  # by what a capture depends on: what launches it; None after the first step
        self.numbers: dict[int, tuple[float, Tensor]] = {}  # place in the tree -> (value, where graphs read it)
        self.sums: dict[tuple[str, ...], Tensor] = {}  # of metrics with these names, and the number of steps in them
        self.skipped = torch.zeros(3, device=self.device)  # since `settle`; in a row; most in a row since `settle`
        learner.settle = self.settle
        learner.run.metrics.sources.append(self.take_means)

    def take(self, gradients: Callable[..., Metrics], args: Any, loss: Any, *batch: Any) -> Metrics:
        """Take a step; the next one with batches of this shape overwrites the metrics that it returns."""
        first = vars(self.learner.args)
        changed = {name: value for name, value in vars(args).items() if value != first[name]}
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        leaves, form = tree_flatten((changed, rates, batch))
        leaves = [float(leaf) if _is_number_on_cpu(leaf) else leaf for leaf in leaves]
        inputs = [self._number(i, leaf) if isinstance(leaf, float) else leaf for i, leaf in enumerate(leaves)]
        key = (gradients, loss, form, *map(_kind, leaves))

        def step(inputs: list[Any]) -> Metrics:
            changed, rates, batch = tree_unflatten(inputs, form)
            settings = copy.copy(args)
            vars(settings).update(changed)
            return self._step(gradients(settings, self.learner, loss, *batch), rates)

        current = torch.cuda.current_stream(self.device)
        if key not in self.graphs:
            if len(self.graphs) == MOST_GRAPHS:
                self.graphs.clear()
                text = f"gradient steps depend on more than {MOST_GRAPHS} shapes or values; see docs/gpu.md"
                count(self.learner.run, "graphs_cleared", 1, text)
            self.graphs[key] = None
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                metrics = step(inputs)
            current.wait_stream(self.stream)
        else:
            self.graphs[key] = launch = self.graphs[key] or self._capture(step, leaves, inputs)
            metrics = launch(leaves)
        self.learner.record_update({})
        return metrics

    def _capture(
        self, step: Callable[[list[Any]], Metrics], leaves: list[Any], inputs: list[Any]
    ) -> Callable[[list[Any]], Metrics]:
        """Capture a step as a graph; return what launches it with the leaves of another batch."""
        # Of arrays on the CPU, too: they cannot be part of a graph, and what reads them fails here.
        places = [leaf.clone() if _is_data(leaf) else inputs[i] for i, leaf in enumerate(leaves)]
        on_gpu = [i for i, leaf in enumerate(leaves) if _is_data(leaf) and leaf.is_cuda]
        graph = torch.cuda.CUDAGraph()
        try:  # "thread_local": other threads may wait for the GPU meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                metrics = step(places)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = f"gradient steps are launched as a CUDA graph, which failed ({cause_of(error)})"
            fix = "leave what waits for the GPU out of loss and net (item, cpu, masks as indices), or turn it off"
            raise ConfigError("cuda-graph", True, why, fix) from error

        def launch(leaves: list[Any]) -> Metrics:
            torch._foreach_copy_([places[i] for i in on_gpu], [leaves[i] for i in on_gpu])
            graph.replay()
            return metrics

        return launch

    def _step(self, found: Metrics, rates: list[Tensor]) -> Metrics:
        """What one step computes with a gradient and its metrics; returns them."""
        metrics = {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}
        with torch.no_grad():
            skip = ~(self._mean(metrics["losses/grad_norm"]) + self._mean(metrics["losses/total"])).isfinite()
            self._take_adam_step(rates, skip.float())
            means = {name: self._mean(value) for name, value in with_diagnostics(metrics).items()}
            values = torch.stack([*means.values(), self._mean(1.0)])
            if (names := tuple(means)) not in self.sums:
                self.sums[names] = torch.zeros_like(values)
            self.sums[names].add_(values.masked_fill(skip, 0.0))
            num, in_a_row, most = self.skipped
            in_a_row = (in_a_row + 1) * skip
            self.skipped.copy_(torch.stack([num + skip, in_a_row, most.maximum(in_a_row)]))
        return metrics

    def _mean(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device).float().mean()
        return torch.full((), value, device=self.device)

    def _take_adam_step(self, rates: list[Tensor], skip: Tensor) -> None:
        """Let Adam read learning rates, and whether to `skip` the step (1 or 0), from the GPU."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        own = [{name: group[name] for name in ("lr", "capturable")} for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"], group["capturable"] = rate, torch.cuda.is_current_stream_capturing()
        optimizer.grad_scale, optimizer.found_inf = None, skip  # as torch.amp.GradScaler does
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            for group, values in zip(groups, own, strict=True):
                group.update(values)

    def _number(self, i: int, value: float) -> Tensor:
        """Where graphs read a number; it is this one from now on."""
        before, place = self.numbers.get(i) or (value, torch.full((), value, device=self.device))
        if value != before:
            place.fill_(value)
        self.numbers[i] = value, place
        return place

    def settle(self) -> None:
        """Count the steps that were skipped since the last call. Raises TrainingError at five in a row."""
        num, in_a_row, most = map(int, self.skipped.tolist())
        if num:
            self.skipped.copy_(torch.tensor([0.0, in_a_row, in_a_row]))
            self.learner.run.progress.record_update(-num * self.learner.setup.samples_per_update, -num)
            what = f"one of the gradients up to update {self.learner.updates + num}"
            self.learner.gradient_filter.count_skipped(num, most, "the learner", what)

    def take_means(self) -> dict[str, float]:
        """Means of the metrics of the steps since the last call."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for names, sums in self.sums.items():
            *totals, num = sums.tolist()
            sums.zero_()
            if num:
                for name, total in zip(names, totals, strict=True):
                    found[name].append((total, num))
        return {name: sum(t for t, _ in pairs) / sum(n for _, n in pairs) for name, pairs in found.items()}


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad  # else a parameter, which is read in place


def _is_number_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cuda and value.dim() == 0 and value.is_floating_point()


def _kind(value: Any) -> Any:
    """What a graph depends on: one is captured for each; what cannot be compared has none."""
    if isinstance(value, float):
        return float
    if isinstance(value, Tensor):
        if value.requires_grad:
            return id(value)
        constant = value.item() if value.dim() == 0 and not value.is_cuda else None
        return value.shape, value.dtype, value.device, constant
    return value if isinstance(value, Hashable) else object()
