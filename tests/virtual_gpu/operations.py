"""Operations of the virtual GPU: computed on the CPU, in the memory of their tensors, by the rules of a GPU.

Tensors of two devices, generators of another device, waits in a capture: they raise as CUDA does. Views and allocations
are in device.cpp; composite operations reach this as the parts that they are made of, as on a GPU.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from virtual_gpu import ledger

aten = torch.ops.aten
WAITING = {"nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
"""operations after which the host must know a shape or a value"""
FILLING = {"where", "masked_fill", "masked_fill_", "fill_", "lerp", "lerp_", "clamp", "_foreach_mul", "_foreach_mul_"}
"""besides those that torch tags as pointwise: a tensor of one number may be on the CPU"""
KERNEL_ERROR = os.environ.get("VIRTUAL_GPU_KERNEL_ERROR")
NOT_LAUNCHED = {"is_same_size", "is_set_to"}
library: Any = None


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of whose tensors at least one is, or is to be made, on the virtual GPU."""
    name = func._schema.name.removeprefix("aten::")
    call = Call(func, name, kwargs.get("device"))
    host_args = [call.to_host(arg) for arg in args]
    host_kwargs = {key: call.to_host(value) for key, value in kwargs.items()}
    call.check_devices()
    if KERNEL_ERROR:
        raise RuntimeError(KERNEL_ERROR)
    if name in WAITING:
        ledger.wait(name)
    if (graph := ledger.captured_here()) and call.draws:
        raise RuntimeError("CUDA error: a generator in a capture that it is not registered with")
    run = FUSED.get(name, func)
    if has_number_for_tensor(func, host_args):  # torch had made a tensor of it
        run = func.overloadpacket
    outs = [key for key, value in kwargs.items() if isinstance(value, Tensor) and not value.numel()]
    host_kwargs |= {key: torch.empty(0, dtype=kwargs[key].dtype) for key in outs}  # gets its size from the operation
    if graph:
        graph.keep(written_by(func, host_args))
    with torch._C._AutoDispatchBelowAutograd():
        found = run(*host_args, **host_kwargs)
    if name not in NOT_LAUNCHED:
        ledger.launch(call.device.index)
    if graph:
        graph.record(run, host_args, host_kwargs, found)
    for key in outs:
        kwargs[key].set_(torch.ops.virtual_gpu.device(host_kwargs[key], call.device.index, False))
        call.tensors[id(host_kwargs[key])] = host_kwargs[key], kwargs[key]
    return call.to_device(found)


def written_by(func: Any, args: list) -> list[Tensor]:
    """The tensors among the arguments of an operation that it writes to."""
    arguments = zip(args, func._schema.arguments, strict=False)  # others have defaults
    written = [arg for arg, argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return [tensor for arg in written for tensor in (arg if isinstance(arg, list) else [arg])]


def has_number_for_tensor(func: Any, args: list) -> bool:
    numbers = [i for i, arg in enumerate(args) if isinstance(arg, int | float)]
    return any(isinstance(func._schema.arguments[i].type, torch.TensorType) for i in numbers)


class Call:
    """The arguments of one operation as the CPU gets them, and its results as the GPU's."""

    def __init__(self, func: Any, name: str, device: Any):
        self.func, self.name = func, name
        self.devices = {full_device(device)} if device is not None else set()
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the host's: (host's, GPU's)
        self.on_cpu: list[Tensor] = []
        self.draws = False

    def to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_cuda:
                self.on_cpu.append(value)
                return value
            self.devices.add(value.device)
            host = torch.ops.virtual_gpu.host(value)
            self.tensors[id(host)] = host, value
            return host
        if isinstance(value, torch.Generator):
            if value.device.type != "cuda":
                raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{value.device.type}'")
            self.draws = True
            return torch.ops.virtual_gpu.host_generator(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return [self.to_host(item) for item in value]
        return value

    def check_devices(self) -> None:
        """Raise RuntimeError for tensors of two devices, but for numbers and for indices on the CPU."""
        if self.name == "_index_put_impl_":
            for indices in self.on_cpu:
                ledger.upload(indices, False, is_pinned(indices))
        elif self.on_cpu:
            are_numbers = torch.Tag.pointwise in self.func.tags or self.name in FILLING
            if not are_numbers or any(tensor.dim() for tensor in self.on_cpu):
                self.devices.add(torch.device("cpu"))
        if len(self.devices) > 1:
            found = " and ".join(sorted(map(str, self.devices)))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({self.func})")

    @property
    def device(self) -> torch.device:
        [device] = self.devices
        return device

    def to_device(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            if (own := self.tensors.get(id(found))) is not None:
                return own[1]
            return torch.ops.virtual_gpu.device(found, self.device.index, False)
        if isinstance(found, list | tuple):
            return type(found)([self.to_device(item) for item in found])
        return found


def full_device(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def is_pinned(tensor: Tensor) -> bool:
    return bool(tensor.numel() and library.virtual_gpu_is_pinned(tensor.data_ptr()))


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`Tensor.copy_` to, from and within GPUs."""
    if target.is_cuda and source.is_cuda:
        if target.device == source.device:
            return compute(aten.copy_.default, target, source)
        ledger.COUNTS["between_gpus"] += 1  # asynchronous
    host = torch.ops.virtual_gpu.host
    with torch._C._AutoDispatchBelowAutograd():
        if not target.is_cuda:
            ledger.download(target, host(source), non_blocking, is_pinned(target))
            return target
        if not source.is_cuda:
            ledger.upload(source, non_blocking, is_pinned(source))
        values, place = host(source) if source.is_cuda else source, host(target)
        if graph := ledger.captured_here():
            graph.keep([place])
            graph.record(aten.copy_.default, [place, values], {}, place)
        place.copy_(values)
    return target


def foreach_copy(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """One launch within a GPU, else one copy for each tensor."""
    if all(target.device == source.device for target, source in zip(targets, sources, strict=True)):
        compute(aten._foreach_copy_.default, targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking)


def local_scalar(tensor: Tensor) -> Any:
    """`Tensor.item`"""
    ledger.COUNTS["downloads"] += 1
    ledger.wait("item")
    return torch.ops.virtual_gpu.host(tensor).item()


def index_put(self: Tensor, indices: list[Tensor | None], *args: Any, **kwargs: Any) -> Tensor:
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        ledger.wait("index by a mask")
    return compute(aten._index_put_impl_.default, self, indices, *args, **kwargs)


# ---- CUDA's fused LSTM cell, which the CPU does not have


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(next hidden state [B, S], next cell state [B, S], activated gates [B, 4 S])."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of the gates [B, 4 S], of cx [B, S], of the bias [4 S])."""
    i, f, g, o = gates.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    grad = (torch.zeros_like(cy) if grad_cy is None else grad_cy) + grad_hy * o * (1 - tanh**2)
    parts = grad * g * i * (1 - i), grad * cx * f * (1 - f), grad * i * (1 - g**2), grad_hy * tanh * o * (1 - o)
    grad_gates = torch.cat(parts, 1)
    return grad_gates, grad * f, grad_gates.sum(0) if has_bias else None


FUSED = {"_thnn_fused_lstm_cell": lstm_cell, "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward}


def register(compiled: Any) -> list[torch.library.Library]:
    """Register all operations; they last as long as what is returned."""
    global library
    library = compiled
    fallback, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(compute, "CUDA")
    own.impl("copy_", copy, "CUDA")
    own.impl("_foreach_copy_", foreach_copy, "CUDA")
    own.impl("_local_scalar_dense", local_scalar, "CUDA")
    own.impl("_index_put_impl_", index_put, "CUDA")
    warnings.filterwarnings("ignore", ".*\\n.*Overriding a previously registered kernel", UserWarning)
    for name in filter(is_one_kernel, torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, base), overload or "default")
        own.impl(name.removeprefix("aten::"), partial(compute, func), "CUDA")
    return [fallback, own]


def is_one_kernel(name: str) -> bool:
    """Whether CUDA has a kernel for an operation that other devices would compute in parts."""
    base, _, overload = name.partition(".")
    if not name.startswith("aten::") or overload.endswith("out") or base == "aten::_foreach_copy_":
        return False
    by_parts = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutogradNonFunctional")
    return by_parts or base.startswith("aten::_foreach_") or base in ("aten::convolution", "aten::convolution_backward")
