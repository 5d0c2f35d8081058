"""Dims that must be static: a packed matrix X[B, 43] read column by column.

With a symbolic dim 1, `X[:, 3:4]` has size Max(0, Min(4, s1) - Min(3, s1)): the trace takes 8 s and later broadcasts
fail on it. A dim that is cut at positive constants, or indexed by a list, is a layout, not a length, unless it has had
another size. `x[:, 0]`, `x[:, -1]` and `x[:, 1:]` leave it dynamic, and so do `x[:, :8]` and `x[:, -8:]`, where a guard
tells whether it has so many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxopt.capture.errors import StartAgain
from fxopt.capture.inputs import Dim, FakeInputs, Shapes
from fxopt.torch_internals.symbols import expression, static
from fxopt.trees import leaves


class MakeStatic(StartAgain):
    """With these dims static: they are a layout."""


class MakePositive(StartAgain):
    """With these dims at least 1, as an item of them is taken: `x[:, 1:]` is then one term, not a Max."""


_BY_DIM = {
    Tensor.split, torch.split, torch.functional.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind,
    Tensor.tensor_split, torch.tensor_split, Tensor.split_with_sizes, torch.split_with_sizes,
}  # fmt: skip
_UNBIND = {Tensor.unbind, torch.unbind}
_INDEX = {Tensor.index_select, torch.index_select}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}  # which serve no signal of no length, unlike a linear
_SELECT = {Tensor.select, torch.select, Tensor.narrow, torch.narrow}


class PackedDims(TorchFunctionMode):
    """Fixes the dims >= 1 of an input, for the rest of a trace, at the first cut of one at a positive constant.

    Raises `MakeStatic` where they are traced with other sizes than the example's, and `MakePositive` where the first or
    last items of such a dim are taken, or it is convolved.

    Args:
        shapes: the sizes that the inputs are traced with.
        reals: the example.
        positive: dims that are known to be at least 1. varied: dims that are no layout, as they have had other sizes.
    """

    def __init__(
        self, fakes: FakeInputs, shapes: Shapes, reals: Sequence[Tensor], positive: set[Dim], varied: frozenset[Dim]
    ):
        super().__init__()
        self._fakes, self._shapes, self._reals = fakes, shapes, reals
        self._positive, self._varied = positive, varied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = _argument(args, kwargs, 0, "input", "tensor")
        if func is Tensor.__getitem__:
            parts = list(_by_dim(args[1]))
            self._check(source, (dim for dim, part in parts if _is_cut(part)))
            self._demand_items(source, (dim for dim, part in parts if _has_end(part)))
        elif func in _SELECT:
            dim, index = _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "index", "start")
            length = _argument(args, kwargs, 3, "length")
            if isinstance(dim, int) and _positive(index):
                self._check(source, [dim])
            elif isinstance(dim, int) and length is None:
                self._demand_items(source, [dim])
        elif func in _INDEX:
            dim, index = _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "index")
            if isinstance(dim, int) and _is_layout(index):
                self._check(source, [dim])
        elif func in _CONVOLUTIONS:
            self._demand_items(source, range(2, source.dim()))
        elif func in _BY_DIM:
            dim = _argument(args, kwargs, 1 if func in _UNBIND else 2, "dim")
            if all(type(size) is int for size in leaves(args[1:2])):
                self._check(source, [dim or 0])
        return func(*args, **kwargs)

    def _check(self, tensor: Any, dims: Iterable[int]) -> None:
        inputs = {i for i, _ in self._dims_of(tensor, dims) - self._varied}
        if not inputs:
            return
        every = (dim for dims in self._fakes.sources.values() for dim in dims)
        layout = {(i, axis) for i, axis in every if i in inputs and axis >= 1} - self._varied
        if any(self._shapes[i][axis] != self._reals[i].shape[axis] for i, axis in layout):
            raise MakeStatic(layout)
        for i, axis in layout:
            int(self._fakes.tensors[i].shape[axis])  # which is its size from now on

    def _demand_items(self, tensor: Any, dims: Iterable[int]) -> None:
        found = self._dims_of(tensor, dims) - self._positive
        if found:
            raise MakePositive(found)

    def _dims_of(self, tensor: Any, dims: Iterable[int]) -> set[Dim]:
        """The input dims >= 1 that the sizes of `tensor` in `dims` depend on."""
        if not isinstance(tensor, Tensor):
            return set()
        sizes: list[Any] = [tensor.shape[d] for d in dims if -tensor.ndim <= d < tensor.ndim]
        symbols = {s for size in sizes if isinstance(size, torch.SymInt) for s in expression(size).free_symbols}
        return {dim for s in symbols for dim in self._fakes.sources.get(str(s), ()) if dim[1] >= 1}


def _argument(args: tuple, kwargs: dict, position: int, *names: str) -> Any:
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _positive(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_cut(part: Any) -> bool:
    if isinstance(part, slice):
        return _positive(part.stop) and not _is_prefix(part)
    return _positive(part) or _is_layout(part)


def _is_prefix(part: Any) -> bool:
    return isinstance(part, slice) and _is_first(part.start) and part.step in (None, 1) and _positive(part.stop)


def _is_first(start: Any) -> bool:
    return start is None or (type(start) is int and start == 0)


def _is_layout(index: Any) -> bool:
    """Whether it picks fixed places, as the triangle of a dot interaction does: a list, or a tensor whose sizes are no
    input's. Not `x[arange(B), lengths - 1]`."""
    if isinstance(index, list | tuple):
        return any(map(_positive, index))
    return isinstance(index, Tensor) and index.dim() > 0 and all(static(size) is not None for size in index.shape)


def _has_end(part: Any) -> bool:
    """Whether an index counts from an end: 0, -1, `1:` or `:-1`."""
    if isinstance(part, slice):
        return not _is_first(part.start) or (isinstance(part.stop, int) and part.stop < 0)
    return type(part) is int


def _by_dim(index: Any) -> Iterator[tuple[int, Any]]:
    """The dims of a tensor, each with the part of `tensor[index]` that cuts it."""
    parts = index if isinstance(index, tuple) else (index,)
    dim, after_ellipsis = 0, False
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dim, after_ellipsis = -sum(p is not None for p in parts[number + 1 :]), True
        elif part is None or isinstance(part, bool):
            continue
        else:
            yield dim, part
            dim += part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
            if after_ellipsis and dim == 0:
                return
