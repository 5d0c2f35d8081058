"""Gradients of fxopt::columns: deterministic, only where asked for; dense but for :func:`.row_gradients.want`.

Sums, means and plain lookups scatter into dense table gradients in the kernel (`fxopt::columns_backward`), or give the
rows that are touched.
The rest, a few columns as a rule, differentiates the reference: weights, divisors, values that are computed, max
pooling, half-precision tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fxopt.torch_internals.modes import no_dispatch_modes
from fxopt.torch_internals.operators import below_autograd, has_kernel

from .. import gradients
from . import cuda, in_backward, reference, row_gradients
from .cuda import backward as cuda_backward
from .encode import encode, plan_of
from .plan import Column, Op, Plan

_KERNEL_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
_BACKWARD = "fxopt::columns_backward"


@dataclass(frozen=True)
class _Part:
    """Columns that a kernel differentiates, and the outputs and tables of theirs."""

    plan: Tensor
    outputs: tuple[int, ...]
    tables: tuple[int, ...]


@dataclass(frozen=True)
class _Rest:
    """Columns that the reference differentiates, and the outputs of theirs; `tables`: in their tables, too."""

    plan: Plan
    outputs: tuple[int, ...]
    tables: bool


@dataclass(frozen=True)
class _Split:
    """Which columns the kernel differentiates in their tables, to dense gradients or touched rows, which are copies of
    tensors, whose gradients are parts of the outputs', and which the reference differentiates."""

    dense: _Part | None
    rows: _Part | None
    copies: tuple[Column, ...]
    rest: tuple[_Rest, ...]


_splits: WeakIdKeyDictionary = WeakIdKeyDictionary()
_differentiable: WeakIdKeyDictionary = WeakIdKeyDictionary()
_read_again: WeakIdKeyDictionary = WeakIdKeyDictionary()


def setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, tables, plan = inputs
    ctx.save_for_backward(plan, *tensors, *(tables[t] for t in _tables_read_again(plan, tensors)))
    ctx.n_tensors, ctx.tables = len(tensors), tables
    gradients.mark(ctx, (*tensors, *tables), output, _differentiable_in(plan, len(tensors)))


def _differentiable_in(plan: Tensor, n_tensors: int) -> list[set[int]]:
    """For each output the tensors and, numbered behind them, the tables that it has a gradient in."""
    found = _differentiable.get(plan)
    if found is None:
        decoded = plan_of(plan)
        found = _differentiable[plan] = [set() for _ in decoded.widths]
        for column in decoded.columns:
            found[column.output].update(_float_inputs(column))
            if column.table is not None:
                found[column.output].add(n_tensors + column.table)
    return found


def _tables_read_again(plan: Tensor, tensors: Sequence[Tensor]) -> list[int]:
    """The tables whose numbers a gradient needs: that of a maximum, or in what rows are multiplied with. The others may
    be edited between forward and backward, as in eager."""
    found = _read_again.get(plan)
    if found is None:
        looked_up = [column for column in plan_of(plan).columns if column.table is not None]
        largest = {column.table for column in looked_up if column.pool == "max"}
        by_tensor = [(tensor, column.table) for column in looked_up for tensor in _float_inputs(column)]
        found = _read_again[plan] = largest, by_tensor
    largest, by_tensor = found
    return sorted(largest.union(table for tensor, table in by_tensor if tensors[tensor].requires_grad))


def backward(ctx: Any, grads: list[Any]) -> tuple[list[Tensor | None], list[Tensor | None], None]:
    plan, *saved = ctx.saved_tensors
    tensors, tables = saved[: ctx.n_tensors], ctx.tables
    needs_tensors, needs_tables, _ = ctx.needs_input_grad
    if gradients.by_definition(grads):
        flowing, outputs = plan_of(plan).of([c for c in plan_of(plan).columns if grads[c.output] is not None])
        if flowing is None:
            return [None] * len(tensors), [None] * len(tables), None
        chosen = [grads[o] for o in outputs]
        found = _by_reference(flowing, chosen, tensors, tables, needs_tensors, needs_tables)
        return found[: len(tensors)], found[len(tensors) :], None
    by_kernel = tuple(
        _kernel_of(table.device, table.dtype) if need else "" for need, table in zip(needs_tables, tables, strict=True)
    )
    touched = tuple(
        bool(device) and (row_gradients.sparse(table) or in_backward.take(table))
        for table, device in zip(tables, by_kernel, strict=True)
    )
    flows = tuple(grad is not None for grad in grads)
    split = _split(plan, tuple(map(bool, needs_tensors)), tuple(map(bool, needs_tables)), by_kernel, touched, flows)
    tensor_grads: list[Tensor | None] = [None] * len(tensors)
    table_grads_: list[Tensor | None] = [None] * len(tables)
    for part, gradients_of in (
        (split.dense, _dense_gradients),
        (split.rows, row_gradients.row_gradients),
    ):
        if part is not None:
            found = gradients_of(
                [grads[o].contiguous() for o in part.outputs],
                tensors,
                [tables[t] for t in part.tables],
                torch.ops.aten.lift_fresh(part.plan),  # a constant, also while someone traces this backward
            )
            for index, grad in zip(part.tables, found, strict=True):
                table_grads_[index] = grad
    for column in split.copies:
        tensor = column.source.tensor
        grad, before = _copied(column, grads[column.output], tensors[tensor]), tensor_grads[tensor]
        tensor_grads[tensor] = grad if before is None else before + grad
    for rest in split.rest:
        needs = needs_tables if rest.tables else [False] * len(tables)
        found = _by_reference(rest.plan, [grads[o] for o in rest.outputs], tensors, tables, needs_tensors, needs)
        parts = found[: len(tensors)], found[len(tensors) :]
        for sums, more in zip((tensor_grads, table_grads_), parts, strict=True):
            sums[:] = [b if a is None else a if b is None else b + a for a, b in zip(sums, more, strict=True)]
    return tensor_grads, table_grads_, None


def _dense_gradients(
    grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor
) -> list:
    with below_autograd():  # nothing records this, and to be told so takes 5 us
        return torch.ops.fxopt.columns_backward(grads, tensors, tables, plan)


def no_second_derivative(ctx: Any, grads: list[Tensor]) -> None:
    raise RuntimeError("fxopt.columns: second derivatives are not implemented; run the model eagerly for them")


def _kernel_of(device: torch.device, dtype: torch.dtype) -> str:
    """The device whose kernel gives such a table's gradient; "" where none does."""
    if dtype not in _KERNEL_DTYPES.get(device.type, ()):
        return ""
    if device.type == "cuda":
        return "cuda" if cuda.serves(device.index) else ""
    return "cpu" if _is_compiled() else ""


@functools.cache
def _is_compiled() -> bool:
    """Once: asking the dispatcher takes 5 us, and kernels are tried for before anything is looked up."""
    return has_kernel(_BACKWARD, "CPU")


def _is_copy(column: Column) -> bool:
    """Whether a column is numbers of a tensor [B] or [B, L] as they are."""
    source, plain = column.source, (column.table, column.bag, column.weights, column.divisor, column.lengths)
    by_row = source.rows == (0,) and source.lane in (None, 1) and not source.fixed
    return by_row and plain == (None,) * 5 and not column.program and column.pool == "none"


def _copied(column: Column, grad: Tensor, tensor: Tensor) -> Tensor:
    """The gradient of what :func:`_is_copy`."""
    if column.source.lane is None:
        return grad[:, column.offset].to(tensor.dtype)
    start, end = column.source.start, tensor.shape[1]
    width = end - start if column.source.length is None else column.source.length
    part = grad[:, column.offset : column.offset + width].to(tensor.dtype)
    return part if width == end else F.pad(part, (start, end - start - width))


def _by_reference(
    plan: Plan,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    tables: Sequence[Tensor],
    needs_tensors: Sequence[bool],
    needs_tables: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the reference, computed again; None where none is needed or none flows."""
    rows = [grad.shape[0] for grad in grads]

    def columns(*given: Any) -> list[Tensor]:
        return reference.columns(given[: len(tensors)], given[len(tensors) :], plan, rows=rows, check=False)

    needs = [*map(bool, needs_tensors), *map(bool, needs_tables)]
    return gradients.again(columns, (*tensors, *tables), grads, needs)


def _split(plan_tensor: Tensor, *key: tuple) -> _Split:
    cache = _splits.setdefault(plan_tensor, {})
    if key not in cache:
        cache[key] = _make_split(plan_of(plan_tensor), *key)
    return cache[key]


def _make_split(
    plan: Plan, needs_tensors: tuple, needs_tables: tuple, by_kernel: tuple, touched: tuple, flows: tuple
) -> _Split:
    """flows: whether a gradient comes for each output."""
    kernel: list[Column] = []
    copies: list[Column] = []
    weights: list[Column] = []
    rest: list[Column] = []
    sums = {(column.output, column.offset) for column in plan.columns if column.add}  # gradients that many would share
    for column in plan.columns:
        if not flows[column.output]:
            continue
        fast = column.table is not None and by_kernel[column.table] and column.pool != "max"
        fast = fast and bool(column.bag or column.source.rows)  # a kernel plan tells its rows by itself
        if fast and by_kernel[column.table] == "cuda":  # type: ignore[index]
            fast = cuda_backward.differentiates(column, plan.dtypes[column.output])
        values = any(needs_tensors[t] for t in _float_inputs(column))
        if fast:
            kernel.append(column)
        if values and _is_copy(column) and (column.output, column.offset) not in sums:
            copies.append(column)
        elif values:
            (weights if fast else rest).append(column)
        elif not fast and column.table is not None and needs_tables[column.table]:
            rest.append(column)
    parts = ((plan.of(some), tables) for some, tables in ((weights, False), (rest, True)))
    by_reference = tuple(_Rest(part, outputs, tables) for (part, outputs), tables in parts if part is not None)
    dense, rows = ([c for c in kernel if touched[c.table or 0] is some] for some in (False, True))
    return _Split(_part(plan, dense), _part(plan, rows), tuple(copies), by_reference)


def plan_of_tables(plan: Tensor, tables: Sequence[Tensor], n_tensors: int) -> Tensor | None:
    """The plan of the kernel that takes the gradients of all outputs and gives those of all tables, on the CPU; None
    where a gradient needs more than that."""
    by_kernel = tuple(_kernel_of(table.device, table.dtype) for table in tables)
    decoded, no, yes = plan_of(plan), (False,), (True,)
    outputs, n = len(decoded.widths), len(tables)
    if set(by_kernel) != {"cpu"}:
        return None
    split = _make_split(decoded, no * n_tensors, yes * n, by_kernel, no * n, yes * outputs)
    part = split.dense
    whole = part is not None and part.outputs == tuple(range(outputs)) and part.tables == tuple(range(n))
    return part.plan if part is not None and whole and not split.rest else None


def _part(plan: Plan, columns: list[Column]) -> _Part | None:
    tables = tuple(sorted({c.table for c in columns if c.table is not None}))
    part, outputs = plan.of(columns)
    if part is None:
        return None
    numbered = {table: i for i, table in enumerate(tables)}
    renamed = tuple(replace(c, table=numbered[c.table]) for c in part.columns if c.table is not None)
    with no_dispatch_modes():  # data, also while someone traces this backward with fake tensors
        return _Part(encode(replace(part, columns=renamed)), outputs, tables)


def _float_inputs(column: Column) -> list[int]:
    """Tensors that a column is differentiable in, when they require grad."""
    divisor = column.divisor.source if column.divisor else None
    sources = [s for s in (column.weights, divisor, column.source if column.table is None else None) if s]
    added = [i.tensor for i in column.program if i.op == Op.ADD_TENSOR] if column.table is None else []
    return [s.tensor for s in sources] + added
