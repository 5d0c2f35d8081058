"""Gradients of tables as the rows that are touched, for those who ask: a table of 1M rows has few in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fxopt.torch_internals.autograd import hooks_of

_wanted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def want(table: Tensor) -> None:
    """From now on backward gives this leaf a sparse gradient where the kernel can: coalesced, the dense one's bits."""
    _wanted[table] = None


def unwant(table: Tensor) -> None:
    _wanted.pop(table, None)


def wanted(table: Tensor) -> bool:
    return bool(_wanted) and table in _wanted


def sparse(table: Tensor) -> bool:
    """Whether a backward gives it one. Where the caller has hung hooks on it they see the dense gradient, as ever."""
    return wanted(table) and not hooks_of(table)


def row_gradients(grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor) -> list:
    """A sparse [R, D] for each table: what fxopt::columns_row_gradients found."""
    found = torch.ops.fxopt.columns_row_gradients(grads, tensors, tables, plan)
    return [
        torch.sparse_coo_tensor(rows, values, table.shape, is_coalesced=True, check_invariants=False)
        for table, rows, values in zip(tables, found[::2], found[1::2], strict=True)
    ]


def rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a gradient, int64 [n] and growing, and theirs [n, D]."""
    if grad.layout is torch.strided:
        rows = (grad != 0).any(1).nonzero().view(-1)
        return rows, grad[rows]
    rows = grad._indices()[0]
    if not grad.is_coalesced() and not bool((rows[1:] > rows[:-1]).all()):  # autograd forgets that it was
        grad = grad.coalesce()
    return grad._indices()[0], grad._values()
