"""Calls in which torch takes sizes for numbers, which would fix them: they are recorded with sizes that are terms.

These are poolings whose window is a length (`F.max_pool1d(x, x.shape[2])`) or whose fake result reads one, a `linspace`
of a length, diagonals that lie as far from the main one as there are rows, and `take_along_dim`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils._pytree import tree_any

from fxopt.capture.recurrent import differentiable
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.python_math import is_of_numbers
from fxopt.torch_internals.symbols import expression
from fxopt.torch_internals.tracing import disable_proxy_modes_tracing, record_call

aten = torch.ops.aten
_POOLS = {
    F.max_pool1d: (aten.max_pool1d.default, 1),
    torch.max_pool1d: (aten.max_pool1d.default, 1),
    F.avg_pool1d: (aten.avg_pool1d.default, 1),
    F.max_pool2d: (aten.max_pool2d.default, 2),
    torch.max_pool2d: (aten.max_pool2d.default, 2),
    F.avg_pool2d: (aten.avg_pool2d.default, 2),
}
_OPERATORS = {operator for operator, _ in _POOLS.values()} | {aten.linspace.default}
_USUAL = {
    "dilation": 1, "ceil_mode": False, "return_indices": False, "count_include_pad": True, "divisor_override": None,
}  # fmt: skip


def symbols_as_numbers(node: Node) -> set[sympy.Symbol]:
    """Those of sizes that a call takes for numbers, in which a trace by torch alone would fix them."""
    if node.op != "call_function" or not (is_of_numbers(node.target) or node.target in _OPERATORS):
        return set()
    values = [value.meta["val"] for value in node.all_input_nodes]
    sizes: list[Any] = [value for value in values if isinstance(value, torch.SymInt | torch.SymFloat)]
    sizes += [size for value in values if isinstance(value, torch.Tensor) for size in value.shape[2:]]
    return {symbol for size in sizes for symbol in expression(size).free_symbols}


def numbered(func: Any, args: tuple, kwargs: dict[str, Any], tracer: Any) -> torch.Tensor | None:
    """The result of such a call, recorded; None for any other, and where torch itself is to say what is wrong."""
    make = _pooled if func in _POOLS else _MADE.get(func)
    if make is None or not args or not all(isinstance(v, FakeTensor) for v in args if isinstance(v, torch.Tensor)):
        return None
    return make(func, *args, **kwargs, tracer=tracer)


def _pooled(
    func: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any, tracer: Any, **named: Any
) -> torch.Tensor | None:
    operator, count = _POOLS[func]
    reads = operator is aten.max_pool1d.default and isinstance(x.shape[-1], torch.SymInt)
    if rest or x.dim() not in (count + 1, count + 2) or any(_USUAL.get(name) != named[name] for name in named):
        return None
    if not (reads or _holds_sizes([kernel_size, stride, padding])):
        return None
    kernel, edges = _each(kernel_size, count), _each(padding, count)
    steps = _each(stride, count) or kernel
    sizes = []
    for size, window, step, edge in zip(x.shape[-count:], kernel, steps, edges, strict=True):
        if not (window >= 1 and step >= 1 and edge >= 0 and window >= 2 * edge and size + 2 * edge >= window):
            return None
        sizes.append((size + 2 * edge - window) // step + 1)
    with disable_proxy_modes_tracing():
        result = _image(x, kernel, steps, edges) if count == 1 and not _holds_sizes([kernel, steps, edges]) else None
        if result is None:
            (result,) = differentiable([x.new_empty([*x.shape[:-count], *sizes])], [x])
    record_call(operator, (x, kernel, steps, edges), {}, result, tracer)
    return result


def _image(x: torch.Tensor, kernel: list[int], steps: list[int], edges: list[int]) -> torch.Tensor:
    """As torch pools a signal, but for inference on a CPU, where the result is contiguous."""
    pooled = F.max_pool2d(x.unsqueeze(-2), [1, *kernel], [1, *steps], [0, *edges]).squeeze(-2)
    return pooled if pooled.requires_grad or x.device.type != "cpu" else pooled.contiguous()


def _linspace(
    func: Any, start: Any, end: Any, steps: Any, *, tracer: Any, dtype: Any = None, device: Any = None, **named: Any
) -> torch.Tensor | None:
    if FakeTensor in (type(start), type(end)):
        return _without_gradients(func, start, end, steps, tracer=tracer, dtype=dtype, device=device, **named)
    if named or not isinstance(steps, torch.SymInt) or not {type(start), type(end)} <= {int, float}:
        return None
    kwargs = {"dtype": dtype, "device": torch.empty(0, device=device).device, "pin_memory": False}
    with disable_proxy_modes_tracing():
        result = torch.empty(steps, dtype=dtype, device=device)
    record_call(aten.linspace.default, (start, end, steps), kwargs, result, tracer)
    return result


def _without_gradients(func: Any, start: Any, end: Any, *rest: Any, tracer: Any, **named: Any) -> torch.Tensor | None:
    """Between ends that record gradients: torch's function drops these, where its operator's backward is an error."""
    ends = [value.detach() if isinstance(value, torch.Tensor) else value for value in (start, end)]
    return func(*ends, *rest, **named) if FakeTensor in map(type, ends) and torch.is_grad_enabled() else None


def _diagonal(
    func: Any, x: Any, offset: Any = 0, dim1: int = 0, dim2: int = 1, *, tracer: Any, **named: Any
) -> torch.Tensor | None:
    """The main one of what is left behind the offset."""
    offset = named.pop("diagonal", offset)
    if named or not isinstance(offset, torch.SymInt) or x.dim() < 2:
        return None
    right = bool(offset >= 0)
    rest = aten.slice.Tensor(x, dim2 if right else dim1, offset if right else -offset, sys.maxsize)
    return func(rest, 0, *([dim1, dim2] if func in (torch.diagonal, torch.Tensor.diagonal) else []))


def _taken(func: Any, x: Any, indices: Any, dim: Any = None, *, tracer: Any, **named: Any) -> torch.Tensor | None:
    """As torch does it, whose indices may count from the end."""
    if named or dim is None or not x.dim() == indices.dim() > 0 or not _holds_sizes([*x.shape, *indices.shape]):
        return None
    if indices.dtype is not torch.int64 or not -x.dim() <= dim < x.dim():
        return None
    dim %= x.dim()
    axes = [axis for axis in range(x.dim()) if axis != dim]
    if not all(x.shape[axis] == indices.shape[axis] for axis in axes):  # what is broadcast is no plain gather
        return None
    return torch.gather(x, dim, indices.remainder(x.shape[dim]))


_MADE: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.linspace: _linspace,
    torch.logspace: _without_gradients,
    **dict.fromkeys((torch.diag, torch.Tensor.diag, torch.diagonal, torch.Tensor.diagonal), _diagonal),
    **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _taken),
}


def _holds_sizes(values: Any) -> bool:
    return tree_any(lambda value: isinstance(value, torch.SymInt), values)


def _each(value: Any, count: int) -> list[Any]:
    """Of each dim; none where there is no value."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values
