"""Fake results of elementwise operators without torch's references, which ask about every size and stride.

A clamp of a tensor with symbolic sizes takes torch 20 ms: it is traced as comparisons and wheres, each with shapes to
broadcast and strides to sort. Where equal sizes are spelled alike and all tensors lie row by row, nothing is to be
asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt.torch_internals import known_sizes
from fxopt.torch_internals.known_sizes import CONSTRUCTORS, constructed, expressions, fresh, is_contiguous, is_of
from fxopt.torch_internals.known_views import SHORT_VIEWS

aten = torch.ops.aten
SHORT = {**known_sizes.SHORT, **SHORT_VIEWS}

# One result, whose dtype does not depend on the values of numbers.
_PACKETS = (
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.remainder, aten.fmod, aten.maximum, aten.minimum,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.abs, aten.neg, aten.floor, aten.ceil, aten.trunc, aten.sqrt,
    aten.rsqrt, aten.reciprocal, aten.exp, aten.log, aten.log1p, aten.sigmoid, aten.tanh, aten.relu, aten.silu,
    aten.gelu, aten.leaky_relu, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.where, aten.masked_fill,
    aten.logical_and, aten.logical_or, aten.logical_not, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor,
    aten.bitwise_not, aten.isnan, aten._to_copy,
)  # fmt: skip


def _gives_a_tensor(operator: Any) -> bool:
    schema = operator._schema
    return [str(r.type) for r in schema.returns] == ["Tensor"] and not schema.is_mutable


_overloads = (getattr(packet, name) for packet in _PACKETS for name in packet.overloads())
_ELEMENTWISE = frozenset(filter(_gives_a_tensor, _overloads))
# On a CPU their results lie row by row, whatever their input does; torch's fake ones lie as the input does.
_NORMS = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
}  # fmt: skip
_ROW_BY_ROW = _NORMS | {
    aten.log_sigmoid_forward.default, aten.rrelu_with_noise.default, aten.nll_loss2d_forward.default,
}  # fmt: skip
_OF_KEYWORDS = frozenset({aten.clone.default, aten._sparse_addmm.default})  # the others read none
_SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
_IMAGES = (4, 5)  # ranks whose norms keep channels last
_found: dict[tuple[Any, ...], torch.dtype | None] = {}  # by operator and what of the arguments decides


class CaptureFakeMode(FakeTensorMode):
    """Torch's fake mode, with a short way for elementwise operators and those of known_sizes.py.

    Args:
        cached: whether torch remembers the results of its own way.
    """

    def __init__(self, shape_env: ShapeEnv, cached: bool) -> None:
        super().__init__(shape_env=shape_env, allow_non_fake_inputs=True)
        self.cache_enabled = cached

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ELEMENTWISE:
            out: Any = self._elementwise(func, args, kwargs or {})
            if out is not None:
                return out
        if func in SHORT and (not kwargs or func in _OF_KEYWORDS):
            out = SHORT[func](self, *args, **(kwargs or {}))
            if out is not None:
                return out
        if func in CONSTRUCTORS:
            return constructed(self, func, args, kwargs or {})
        if func is aten.unbind.int:
            return _items(*args, **(kwargs or {}))
        if func in _SQUEEZES and (squeezed := _squeezed(*args)) is not None:
            return squeezed
        if func is aten.linalg_vector_norm.default:
            return _without_axis(super().dispatch(func, types, args, kwargs), *args)
        found: Any = super().dispatch(func, types, args, kwargs)
        if func in _ROW_BY_ROW and not (func in _NORMS and args[0].ndim in _IMAGES):
            return self._row_by_row(found)
        return found

    def _row_by_row(self, out: Any) -> Any:
        """The result of an operator, or the first of several, as the CPU's kernels lay it out."""
        if isinstance(out, tuple):
            return self._row_by_row(out[0]), *out[1:]
        if not is_of(self, out) or out.fake_device.type != "cpu" or is_contiguous(out):
            return out
        return fresh(self, out.shape, out.dtype, out.fake_device)

    def _elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> FakeTensor | None:
        """The result; None where other strides than contiguous ones may come out, and where torch would raise."""
        tensors: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not is_of(self, *tensors):
            return None
        first = max(tensors, key=lambda t: t.ndim)
        if any(t.fake_device != first.fake_device for t in tensors):
            return None
        sizes = expressions(first.shape)
        alike = all((not t.ndim or expressions(t.shape) == sizes) and is_contiguous(t) for t in tensors)
        shape = first.shape if alike else _broadcast(tensors, first.ndim)
        dtype = None if shape is None else _dtype(func, args, kwargs)
        if shape is None or dtype is None:
            return None
        return fresh(self, shape, dtype, first.fake_device)


def _broadcast(tensors: Sequence[Any], rank: int) -> list[Any] | None:
    """The sizes of a result whose rows lie one behind the other, as those of all tensors do; None where others may come
    out. An axis is spelled in the same way in all tensors that do not have a 1 there."""
    if rank > 3 or not all(is_contiguous(t, gaps=True) for t in tensors):  # strides of images begin at 4
        return None
    sizes: list[Any] = [1] * rank
    for tensor in tensors:
        for axis, size in enumerate(tensor.shape, rank - tensor.ndim):
            if type(size) is int and size == 1:
                continue
            if type(sizes[axis]) is int and sizes[axis] == 1:
                sizes[axis] = size
            elif expressions([size]) != expressions([sizes[axis]]):
                return None
    return sizes


def _without_axis(
    out: Any, x: torch.Tensor, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False
) -> Any:
    """Of torch 2.11, whose fake norm over axes of length 1 keeps them."""
    kept = dims and not keepdim and out.ndim == x.ndim
    return aten.squeeze.dims(out, dims) if kept else out


def _items(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """Of torch, which squeezes pieces of length 1, and leaves their axis where it does not see that length."""
    return [aten.select.int(x, dim, place) for place in range(int(x.shape[dim]))]


def _squeezed(x: torch.Tensor, dims: int | Sequence[int] | None = None) -> torch.Tensor | None:
    """Of torch, which forgets that a size is 1 where that is a term and not a symbol; None where nothing goes."""
    chosen = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    inside = {dim % x.ndim for dim in chosen if -x.ndim <= dim < x.ndim}
    ones = [dim for dim in sorted(inside) if x.shape[dim] == 1]
    if len(inside) < len(chosen) or not any(isinstance(x.shape[dim], torch.SymInt) for dim in ones):
        return None
    for dim in reversed(ones):
        x = aten.select.int(x, dim, 0)
    return x


def _dtype(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the result, from torch's kernels for the device "meta"; None where one is missing."""
    forms = [*map(_form, args), *map(_form, kwargs.values())]
    if not all(forms):
        return None
    key = func, torch.get_default_dtype(), len(args), *forms, *kwargs
    if key not in _found:
        try:
            _found[key] = func(*map(_tiny, args), **{name: _tiny(value) for name, value in kwargs.items()}).dtype
        except Exception:  # torch's own way will raise it
            _found[key] = None
    return _found[key]


def _form(value: Any) -> tuple[Any, ...]:
    """What of an argument decides about the dtype of the result; empty where that is unknown."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim > 0
    if isinstance(value, (bool, int, float)):
        return (type(value),)
    return (value,) if value is None or isinstance(value, (str, torch.dtype)) else ()


def _tiny(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([1] * min(value.ndim, 1), dtype=value.dtype, device="meta")
    return value
