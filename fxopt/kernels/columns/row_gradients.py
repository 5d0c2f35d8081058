"""Gradients of tables as the rows that are touched, for those who ask: a table of 1M rows has few in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fxopt.torch_internals.autograd import hooks_of, running_backward

_wanted: WeakIdKeyDictionary = WeakIdKeyDictionary()
_found: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the rows of each table, kept so that nothing else lies there


def want(table: Tensor) -> None:
    """From now on backward gives this leaf a sparse gradient where the kernel can, of the dense one's bits. On the CPU
    it is coalesced. On CUDA row 0 may follow again, with zeros, so that nothing waits until touched rows are counted.
    """
    _wanted[table] = None


def unwant(table: Tensor) -> None:
    _wanted.pop(table, None)


def wanted(table: Tensor) -> bool:
    return bool(_wanted) and table in _wanted


def any_wanted(tables: Sequence[Tensor]) -> bool:
    return bool(_wanted) and any(map(wanted, tables))


def sparse(table: Tensor) -> bool:
    """Whether a backward gives it one. Where the caller has hung hooks on it they see the dense gradient, as ever."""
    return wanted(table) and not hooks_of(table)


def row_gradients(grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor) -> list:
    """A sparse [R, D] for each table: what fxopt::columns_row_gradients found."""
    found = torch.ops.fxopt.columns_row_gradients(grads, tensors, tables, plan)
    backward = running_backward()
    sparse = []
    for table, rows, values in zip(tables, found[::2], found[1::2], strict=True):
        on_cpu = table.device.type == "cpu"
        sparse.append(torch.sparse_coo_tensor(rows, values, table.shape, is_coalesced=on_cpu, check_invariants=False))
        _found[table] = backward, rows
    return sparse


def rows_of(table: Tensor, unique: bool = False) -> tuple[Tensor, Tensor]:
    """The touched rows of a table's gradient, int64 [n] in growing order, and theirs [n, D]. On CUDA, unless they shall
    be `unique`, they are what :func:`row_gradients` found: in any order, and row 0 again with a gradient of zeros."""
    grad = table.grad
    assert grad is not None
    if grad.layout is torch.strided:
        rows = (grad != 0).any(1).nonzero().view(-1)
        return rows, grad[rows]
    rows = grad._indices()[0]
    if _are_found(table, rows) and (not unique or table.device.type == "cpu"):
        return rows, grad._values()
    if not grad.is_coalesced() and not bool((rows[1:] > rows[:-1]).all()):
        grad = grad.coalesce()
    return grad._indices()[0], grad._values()


def _are_found(table: Tensor, rows: Tensor) -> bool:
    """Whether :func:`row_gradients` gave this table these in this backward: autograd forgets that they grow."""
    backward, found = _found.pop(table, (None, None))
    return backward == running_backward() and found.data_ptr() == rows.data_ptr()
