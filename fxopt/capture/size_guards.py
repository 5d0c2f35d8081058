"""Questions about sizes that torch's fake operators answer silently, asked so that the answers become guards."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.torch_internals.symbols import expression, free_unbacked_symbols

_SQUEEZES = frozenset(getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims")) | frozenset(
    getattr(torch.ops.aten.squeeze_, name) for name in ("default", "dim", "dims")
)
_REGROUPS = {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.unflatten.int}


def guard_sizes(func: Any, args: tuple) -> None:
    """Ask what the result of this operator depends on."""
    if func in _SQUEEZES:
        _guard_squeeze(args)
    elif func is torch.ops.aten.slice.Tensor:
        _guard_slice(args)
    elif func is torch.ops.aten.select.int:
        _guard_select(*args)
    elif func in _REGROUPS:
        _guard_inferred(args[-1])


def _guard_squeeze(args: Any) -> None:
    """Squeezing a symbolic dim gives another rank at size 1: make that a guard (torch assumes "not 1" silently)."""
    tensor, *dims = args
    chosen = range(tensor.ndim) if not dims else [dims[0]] if isinstance(dims[0], int) else dims[0]
    for d in chosen:
        if tensor.ndim:
            bool(tensor.shape[d] != 1)


def _guard_slice(args: Any) -> None:
    """From which end an index counts is a guard: where torch does not know it, it makes up a size without a source."""
    if len(args) > 3 and type(args[3]) is int and args[3] == 1:  # x[:1] is a row to broadcast, not min(1, s) rows
        size = args[0].shape[args[1]]
        if not free_unbacked_symbols(size):
            bool(size >= 1)
    for index in args[2:4]:
        if isinstance(index, torch.SymInt) and not free_unbacked_symbols(index):
            bool(index >= 0)


def _guard_select(tensor: torch.Tensor, dim: int, index: Any) -> None:
    """Of a dim that is too short torch raises; its fake tensors do not, up to torch 2.12, and make no guard."""
    size = tensor.shape[dim] if tensor.ndim else 0
    if type(index) is not int or not isinstance(size, torch.SymInt) or free_unbacked_symbols(size):
        return
    if not size > (index if index >= 0 else -index - 1):
        raise IndexError(f"select(): index {index} is out of range in dimension {dim}")


def _guard_inferred(sizes: Any) -> None:
    """Of no elements no size can be inferred: torch raises, and its fake tensors take it that there are some.

    Sums and products of sizes are not asked: a guard on 12 + 3 * L would fix L.
    """
    given = [size for size in sizes if isinstance(size, torch.SymInt) and expression(size).is_Symbol]
    if given and any(isinstance(size, int) and size == -1 for size in sizes):
        for size in given:
            torch._check(size != 0) if free_unbacked_symbols(size) else bool(size != 0)
