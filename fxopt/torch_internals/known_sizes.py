"""Fake results of parts, joins, lookups, sums and matrix products whose sizes fit as they are spelled.

torch's own fake implementations prove with sympy that sizes are not negative, that numbers of elements are the same and
that tensors are contiguous, which takes 2 to 13 ms an operator. Where equal sizes are the same terms, nothing has to be
proved. Each function here gives what torch's would give, and None where it does not know that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._sympy.functions import Max

from fxopt.torch_internals.symbols import static

aten = torch.ops.aten

_IN_CHANNELS_LAST = (4, 5)  # ranks whose results may have the strides of images


def expressions(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes or strides as terms; equal terms are equal sizes."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def is_of(mode: FakeTensorMode, *values: Any) -> bool:
    """Whether all are plain dense fake tensors of this mode, whose contents are not known."""
    return all(
        type(v) is FakeTensor and v.fake_mode is mode and v.constant is None and v.layout == torch.strided
        for v in values
    )


def is_contiguous(tensor: torch.Tensor, gaps: bool = False) -> bool:
    """Whether each stride is spelled as the product of the sizes behind it, as torch spells those of fresh tensors.

    gaps: or is a larger number, as in a slice of a matrix.
    """
    if tensor.is_neg() or tensor.is_conj():
        return False
    behind: Any = 1
    for size, stride in zip(reversed(expressions(tensor.shape)), reversed(expressions(tensor.stride())), strict=True):
        larger = gaps and isinstance(stride, int) and isinstance(behind, int) and stride > behind
        if stride != behind and not larger:
            return False
        behind = _stride_over(stride, size)
    return True


@functools.lru_cache(1024)  # sympy takes 0.3 ms for a Max
def _stride_over(behind: Any, size: Any) -> Any:
    return behind * (max(1, size) if isinstance(size, int) else Max(1, size))


def fresh(mode: FakeTensorMode, sizes: Sequence[Any], dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """A contiguous tensor in memory of its own."""
    with in_kernel_invocation_manager(mode):
        meta = torch.empty(sizes, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def constructed(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> FakeTensor:
    """What one of `CONSTRUCTORS` gives, whose arguments torch would bind by name first."""
    device = torch.device(kwargs.get("device") or "cpu")
    with in_kernel_invocation_manager(mode):
        meta = func(*args, **{**kwargs, "device": torch.device("meta")})
    return FakeTensor(mode, meta, device)


def _sparse_addmm(mode: FakeTensorMode, dense: Any, *factors: Any, **scales: Any) -> FakeTensor | None:
    """What torch.sparse.mm adds products to. Torch itself has fake results for sizes that are numbers only."""
    return fresh(mode, dense.shape, dense.dtype, dense.fake_device) if is_of(mode, dense) else None


def _gru_cell(mode: FakeTensorMode, input_gates: Any, hidden_gates: Any, hidden: Any, *biases: Any) -> Any:
    """nn.GRUCell on a GPU: the hidden state, and what its backward reads. Torch itself has no fake results for it."""
    rows, columns = hidden.shape
    return tuple(
        fresh(mode, sizes, hidden.dtype, hidden.fake_device) for sizes in ((rows, columns), (rows, 5 * columns))
    )


def _select(mode: FakeTensorMode, x: Any, dim: int, index: Any) -> FakeTensor | None:
    if not is_plain(mode, x) or not -x.ndim <= dim < x.ndim or type(index) is not int:
        return None
    size, dim = static(x.shape[dim]), dim % x.ndim
    if size is None or not -size <= index < size:
        return None
    return _part(mode, x, dim, index % size, None)


def _slice(
    mode: FakeTensorMode, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> FakeTensor | None:
    if not is_plain(mode, x) or not -x.ndim <= dim < x.ndim or step != 1:
        return None
    if not all(bound is None or type(bound) is int for bound in (start, end)):
        return None
    if not start and end == sys.maxsize:
        return strided(mode, x, x.shape, x.stride())
    if (size := static(x.shape[dim])) is None:
        return None
    first, last, _ = slice(start, end).indices(size)
    return _part(mode, x, dim % x.ndim, first, max(0, last - first))


def _detach(mode: FakeTensorMode, x: Any) -> FakeTensor | None:
    return strided(mode, x, x.shape, x.stride()) if is_plain(mode, x) else None


def _unsqueeze(mode: FakeTensorMode, x: Any, dim: int) -> FakeTensor | None:
    if not is_plain(mode, x) or not -x.ndim - 1 <= dim <= x.ndim:
        return None
    dim %= x.ndim + 1
    sizes, strides = list(x.shape), list(x.stride())
    stride = sizes[dim] * strides[dim] if dim < x.ndim else 1
    return strided(mode, x, [*sizes[:dim], 1, *sizes[dim:]], [*strides[:dim], stride, *strides[dim:]])


def _part(mode: FakeTensorMode, x: Any, dim: int, first: int, length: int | None) -> FakeTensor:
    """Some items of a dim, or one of them without the dim."""
    sizes, strides, kept = list(x.shape), list(x.stride()), [] if length is None else [length]
    offset = x.storage_offset() + first * strides[dim] if first else x.storage_offset()
    sizes[dim : dim + 1], strides[dim : dim + 1] = kept, strides[dim : dim + len(kept)]
    return strided(mode, x, sizes, strides, offset)


def strided(mode: FakeTensorMode, x: Any, sizes: Any, strides: Any, offset: Any = None) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        meta = x.as_strided(sizes, strides, offset)
    return FakeTensor(mode, meta, x.fake_device)


def is_plain(mode: FakeTensorMode, x: Any) -> bool:
    return is_of(mode, x) and not (x.is_neg() or x.is_conj())


_MISMATCH = (  # as torch says it
    "Sizes of tensors must match except in dimension {}. Expected {} in dimension {} but got {} for tensor number {} "
    "in the list"
)


def _cat(mode: FakeTensorMode, tensors: Sequence[Any], dim: int = 0) -> FakeTensor | None:
    if not tensors or not is_of(mode, *tensors):
        return None
    first = tensors[0]
    rank = first.ndim
    if rank < 2 or rank in _IN_CHANNELS_LAST or not -rank <= dim < rank:
        return None
    if any((t.ndim, t.dtype, t.fake_device) != (rank, first.dtype, first.fake_device) for t in tensors):
        return None
    dim %= rank
    for number, tensor in enumerate(tensors):
        for axis, (own, common) in enumerate(zip(tensor.shape, first.shape, strict=True)):
            if axis != dim and expressions([own]) != expressions([common]):
                torch._check(own == common, functools.partial(_MISMATCH.format, dim, common, axis, own, number))
    sizes = [*first.shape[:dim], torch.sym_sum([t.shape[dim] for t in tensors]), *first.shape[dim + 1 :]]
    return fresh(mode, sizes, first.dtype, first.fake_device)


def _embedding(mode: FakeTensorMode, weight: Any, indices: Any, *_: Any) -> FakeTensor | None:
    if not is_of(mode, weight, indices) or weight.fake_device != indices.fake_device or weight.ndim != 2:
        return None
    if indices.dtype not in (torch.int64, torch.int32):
        return None
    return fresh(mode, [*indices.shape, weight.shape[1]], weight.dtype, weight.fake_device)


def _index(mode: FakeTensorMode, x: Any, indices: Sequence[Any]) -> FakeTensor | None:
    """Rows of x by numbers."""
    if len(indices) != 1 or not x.ndim or not is_of(mode, x, indices[0]) or x.fake_device != indices[0].fake_device:
        return None
    (rows,) = indices
    if rows.dtype not in (torch.int64, torch.int32) or not rows.ndim or not all(map(is_contiguous, (x, rows))):
        return None
    return fresh(mode, [*rows.shape, *x.shape[1:]], x.dtype, x.fake_device)


def _stack(mode: FakeTensorMode, tensors: Sequence[Any], dim: int = 0) -> FakeTensor | None:
    if not tensors or not is_of(mode, *tensors) or not all(map(is_contiguous, tensors)):
        return None
    first, rank = tensors[0], tensors[0].ndim + 1
    if rank in _IN_CHANNELS_LAST or not -rank <= dim < rank or any(_form(t) != _form(first) for t in tensors):
        return None
    dim %= rank
    return fresh(mode, [*first.shape[:dim], len(tensors), *first.shape[dim:]], first.dtype, first.fake_device)


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.fake_device, expressions(tensor.shape)


def _clone(mode: FakeTensorMode, x: Any, memory_format: Any = torch.preserve_format) -> FakeTensor | None:
    kept = memory_format is torch.preserve_format
    if not is_of(mode, x) or not (is_contiguous(x) if kept else memory_format is torch.contiguous_format):
        return None
    return fresh(mode, x.shape, x.dtype, x.fake_device)


def _sum(mode: FakeTensorMode, x: Any, dims: Sequence[int] | None = None, keepdim: bool = False) -> FakeTensor | None:
    if not is_of(mode, x) or not is_contiguous(x) or not dims or not all(-x.ndim <= dim < x.ndim for dim in dims):
        return None
    gone = {dim % x.ndim for dim in dims}
    if len(gone) < len(dims) or (keepdim and (x.ndim, gone) != (2, {1})):  # torch spells strides there without a Max
        return None
    sizes = [1 if axis in gone else size for axis, size in enumerate(x.shape) if keepdim or axis not in gone]
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    return fresh(mode, sizes, x.dtype if exact else torch.int64, x.fake_device)


def _mean(mode: FakeTensorMode, x: Any, dims: Sequence[int] | None = None, keepdim: bool = False) -> FakeTensor | None:
    return _sum(mode, x, dims, keepdim) if x.dtype.is_floating_point else None


def _all(mode: FakeTensorMode, x: Any) -> FakeTensor | None:
    if not is_of(mode, x):
        return None
    return fresh(mode, [], torch.uint8 if x.dtype is torch.uint8 else torch.bool, x.fake_device)


_UNLIKE = "a and b must have same reduction dim, but got [{}, {}] X [{}, {}]."


def _mm(mode: FakeTensorMode, a: Any, b: Any) -> FakeTensor | None:
    if not is_of(mode, a, b) or (a.ndim, b.ndim) != (2, 2):
        return None
    if (a.dtype, a.fake_device) != (b.dtype, b.fake_device):
        return None
    if expressions(a.shape)[1] != expressions(b.shape)[0]:  # where an input meets a weight: torch asks no more either
        torch._check(a.shape[1] == b.shape[0], functools.partial(_UNLIKE.format, *a.shape, *b.shape))
    return fresh(mode, [a.shape[0], b.shape[1]], a.dtype, a.fake_device)


def _addmm(mode: FakeTensorMode, bias: Any, a: Any, b: Any) -> FakeTensor | None:
    if not is_of(mode, bias, b) or (bias.ndim, b.ndim) != (1, 2):
        return None
    if (bias.dtype, bias.fake_device) != (b.dtype, b.fake_device):
        return None
    return _mm(mode, a, b) if expressions(bias.shape) == expressions(b.shape)[1:] else None


# How torch's own fake implementations make their results.
CONSTRUCTORS = frozenset({aten.empty.memory_format, aten.empty_strided.default})

SHORT: dict[Any, Callable[..., Any]] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.detach.default: _detach,
    aten.unsqueeze.default: _unsqueeze,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.stack.default: _stack,
    aten.clone.default: _clone,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.all.default: _all,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._sparse_addmm.default: _sparse_addmm,
}
