"""Fake results of transposed and expanded tensors, running sums and norms, by short ways like those of known_sizes.py.

Each function here gives what torch's own fake implementation would give, or None where it does not know that. Torch
takes 1-3 ms to transpose, 2-9 to expand, and 20-70 for a running sum or a norm, which it computes in many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from fxopt.torch_internals.known_sizes import expressions, fresh, is_contiguous, is_of, is_plain, strided

aten = torch.ops.aten


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
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.cumsum.default: _cumsum,
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}
