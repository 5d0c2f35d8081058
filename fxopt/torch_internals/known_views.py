"""Fake results of views, transposes, expands, running sums and norms, by short ways like those of known_sizes.py.

Each function here gives what torch's own fake implementation would give, or None where it does not know that. Torch
takes 1-3 ms to transpose, 2-9 to expand, and 20-70 for a running sum or a norm, which it computes in many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import infer_size, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from fxopt.torch_internals.known_sizes import expressions, fresh, is_contiguous, is_of, is_plain, strided

aten = torch.ops.aten


def _view(mode: FakeTensorMode, x: Any, shape: Any) -> FakeTensor | None:
    if not is_of(mode, x) or not x.ndim or not len(shape):
        return None
    if not is_contiguous(x):
        return _split_rows(mode, x, shape)
    if any(isinstance(size, int) and size < 0 for size in shape):
        shape = infer_size(shape, x.numel())
    old, new = expressions(x.shape), expressions(shape)
    if math.prod(old) != math.prod(new) or not all(_is_size(size, mode.shape_env) for size in new):
        return None
    return strided(mode, x, shape, x.stride() if old == new else make_contiguous_strides_for(shape))


def _split_rows(mode: FakeTensorMode, x: Any, shape: Any) -> FakeTensor | None:
    """A part of each wider row, as one product gives queries, keys and values, seen as heads."""
    rows, inner = x.ndim - 1, shape[x.ndim - 1 :]
    if not is_plain(mode, x) or not inner or expressions(x.shape[:rows]) != expressions(shape[:rows]):
        return None
    if any(type(size) is int and size == 1 for size in x.shape[:rows]):  # whose stride torch makes up
        return None
    if not all(type(size) is int and size > 0 for size in (x.shape[-1], *inner)) or expressions(x.stride())[-1] != 1:
        return None
    if math.prod(inner) != x.shape[-1] or not guard_or_false(x.numel() != 0):
        return None
    return strided(mode, x, shape, [*x.stride()[:rows], *make_contiguous_strides_for(inner)])


def _is_size(term: Any, environment: Any) -> bool:
    """Whether a term is not negative, because none of its parts is."""
    if isinstance(term, int) or term.is_Number:
        return bool(term >= 0)
    if term.is_Symbol:
        return bool(environment.var_to_range[term].lower >= 0)
    return (term.is_Mul or term.is_Add) and all(_is_size(part, environment) for part in term.args)


def _permute(mode: FakeTensorMode, x: Any, dims: Sequence[int]) -> FakeTensor | None:
    if not is_plain(mode, x) or len(dims) != x.ndim or not all(-x.ndim <= dim < x.ndim for dim in dims):
        return None
    order = [dim % x.ndim for dim in dims]
    if len(set(order)) < x.ndim:
        return None
    sizes, strides = list(x.shape), list(x.stride())
    return strided(mode, x, [sizes[dim] for dim in order], [strides[dim] for dim in order])


def _transpose(mode: FakeTensorMode, x: Any, one: int, other: int) -> FakeTensor | None:
    if not is_plain(mode, x) or not all(-x.ndim <= dim < x.ndim for dim in (one, other)):
        return None
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(mode, x, order)


def _t(mode: FakeTensorMode, x: Any) -> FakeTensor | None:
    return _permute(mode, x, (1, 0)) if x.ndim == 2 else None


def _expand(mode: FakeTensorMode, x: Any, sizes: Sequence[Any]) -> FakeTensor | None:
    """Dims that stay, and dims of 1. What torch asks about them on its way is asked as well, since guards stay."""
    new, shape, strides = len(sizes) - x.ndim, list(sizes), list(x.stride())
    if not is_plain(mode, x) or new < 0:
        return None
    for axis, size in enumerate(x.shape, new):
        if type(shape[axis]) is int and shape[axis] == -1:
            shape[axis] = size
        if expressions(shape[axis : axis + 1]) != expressions([size]) and not (type(size) is int and size == 1):
            return None
    for size in shape:
        torch._check(size >= 0)
    for axis, size in enumerate(x.shape, new):
        if guard_or_false(size == 1) and not guard_or_false(size == shape[axis]):
            strides[axis - new] = 0
    if not all(guard_or_true(size != 1) for size in shape[:new]):
        return None
    return strided(mode, x, shape, [0] * new + strides)


def _cumsum(mode: FakeTensorMode, x: Any, dim: int) -> FakeTensor | None:
    if not is_of(mode, x) or not is_contiguous(x) or not -x.ndim <= dim < x.ndim:
        return None
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    return fresh(mode, x.shape, x.dtype if exact else torch.int64, x.fake_device)


def _layer_norm(
    mode: FakeTensorMode, x: Any, shape: Sequence[Any], weight: Any, bias: Any, _: float
) -> tuple[FakeTensor, ...] | None:
    """Of rows on the CPU. On a GPU the sums of bfloat16 are float32."""
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if not is_of(mode, *given) or not is_contiguous(x) or not 0 < len(shape) <= x.ndim:
        return None
    if any((t.dtype, t.fake_device.type) != (torch.float32, "cpu") for t in given):
        return None
    if any(expressions(t.shape[-len(shape) :]) != expressions(shape) or t.ndim > len(shape) for t in given[1:]):
        return None
    if expressions(x.shape[-len(shape) :]) != expressions(shape):
        return None
    sums = [*x.shape[: -len(shape)], *[1] * len(shape)]
    return tuple(fresh(mode, sizes, x.dtype, x.fake_device) for sizes in (x.shape, sums, sums))


def _batch_norm(
    mode: FakeTensorMode, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *_: float
) -> tuple[FakeTensor, ...] | None:
    """Of evaluation on the CPU, of [B, D] and [B, D, L]."""
    given = [tensor for tensor in (x, weight, bias, mean, variance) if tensor is not None]
    if not is_of(mode, *given) or not is_contiguous(x) or x.ndim not in (2, 3):
        return None
    if any((t.dtype, t.fake_device.type) != (torch.float32, "cpu") for t in given):
        return None
    if any(expressions(t.shape) != expressions(x.shape[1:2]) for t in given[1:]):
        return None
    return tuple(fresh(mode, sizes, x.dtype, x.fake_device) for sizes in (x.shape, [0], [0]))


SHORT_VIEWS: dict[Any, Callable[..., FakeTensor | tuple[FakeTensor, ...] | None]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.cumsum.default: _cumsum,
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}
