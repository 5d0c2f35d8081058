"""The columns operator in PyTorch: its definition, its gradient where the kernel has none, and its stand-in
on machines without a compiler or for other devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .jagged import segment_of
from .ordered import embedding, embedding_bag
from .plan import Column, Offsets, Plan
from .programs import evaluate, per_row, read, source_rows
from .quantized import dequantized, dim_of


def columns(
    tensors: Sequence[Tensor],
    tables: Sequence[Tensor],
    plan: Plan,
    rows: Sequence[int] | None = None,
    check: bool = True,
) -> list[Tensor]:
    """All outputs of the plan, each contiguous [rows, width].

    Args:
        rows: of each output; by default what the plan and the tensors say.
        check: raise for an id outside its table, in the kernel's words (`errors.explain` reads them).
            Off where ids are known to be good or have no values (fake tensors).
    """
    rows = rows or [rows_of(tensors, plan, output) for output in range(len(plan.widths))]
    tables = [dequantized(table) for table in tables]
    values = [column(tensors, tables, plan, index, rows, check) for index in range(len(plan.columns))]
    return assemble(plan, values, rows)


def assemble(plan: Plan, values: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The outputs from the values of each column, [rows, lanes * D]."""
    slots: list[dict[int, Tensor]] = [{} for _ in plan.widths]
    for column, value in zip(plan.columns, values, strict=True):
        slot = slots[column.output]
        slot[column.offset] = slot[column.offset] + value if column.add else value
    return [_concatenate(*parts) for parts in zip(slots, rows, plan.widths, strict=True)]


def _concatenate(slots: dict[int, Tensor], rows: int, width: int | None) -> Tensor:
    parts, at = [], 0
    for offset, value in sorted(slots.items()):
        if offset > at:
            parts.append(value.new_zeros(rows, offset - at))
        parts.append(value)
        at = offset + value.shape[1]
    if width is not None and width > at:
        parts.append(parts[0].new_zeros(rows, width - at))
    return torch.cat(parts, 1)


def rows_of(tensors: Sequence[Tensor], plan: Plan, output: int) -> int:
    """Rows of an output, from the first of its columns that tells; sizes may be symbolic."""
    for column in plan.columns:
        if column.output != output:
            continue
        if column.segment:
            ids = segment_of(tensors[column.segment.tensor], column.segment, tensors[column.source.tensor].shape[0])
            return ids.stop - ids.start
        if column.bag:
            return bag_rows(tensors[column.bag.tensor].shape[0], column.bag)
        if column.source.rows:
            return source_rows(tensors[column.source.tensor].shape, column.source)
    raise ValueError(f"plan: no column of output {output} tells its number of rows")


def width_of(tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Plan, output: int) -> int:
    """Width of an output whose lanes are known only at run time."""
    column = next(c for c in plan.columns if c.output == output)
    dim = 1 if column.table is None else dim_of(tables[column.table])
    source = column.source
    if column.pool != "none" or source.lane is None:
        return dim
    available = tensors[source.tensor].shape[source.lane] - source.start
    return dim * (available if source.length is None else source.length)


def bag_rows(n_offsets: int, bag: Offsets) -> int:
    return (n_offsets - int(bag.include_last)) // bag.segments  # a bool is no number to torch 2.11's sizes


def column(
    tensors: Sequence[Tensor],
    tables: Sequence[Tensor],
    plan: Plan,
    index: int,
    rows_of_outputs: Sequence[int],
    check: bool = True,
) -> Tensor:
    """The values of one column, [rows, lanes * D]."""
    column = plan.columns[index]
    rows, dtype = rows_of_outputs[column.output], getattr(torch, plan.dtypes[column.output])
    source_shape = tensors[column.source.tensor].shape
    n_ids = source_shape[0] if column.bag else rows
    v, kept = evaluate(tensors, column.program, column.source, read(tensors, column.source, n_ids))
    if column.segment:
        v = v[segment_of(tensors[column.segment.tensor], column.segment, n_ids)]
    if column.lengths is not None:
        counts = torch.arange(v.shape[1], device=v.device) < per_row(tensors, column.lengths, rows)
        kept = counts if kept is None else kept & counts
    if column.table is None:
        result = v.to(dtype)
    else:
        result = _lookup(tensors, tables[column.table], column, v, kept, rows, index if check else None).to(dtype)
    if column.divisor is not None:
        lanes = torch.ones_like(v, dtype=torch.bool) if kept is None else kept
        result = (result / per_row(tensors, column.divisor, rows, lanes).to(_at_least_float(dtype))).to(dtype)
    return result


def _at_least_float(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lookup(
    tensors: Sequence[Tensor],
    table: Tensor,
    column: Column,
    ids: Tensor,
    kept: Tensor | None,
    rows: int,
    check: int | None,
) -> Tensor:
    pools_bags = column.bag is not None and column.segment is None
    if check is not None and not pools_bags:
        check_ids(check, column, ids, table.shape[0])
    if pools_bags:
        return _bag(tensors, table, column, ids.flatten(), rows, check)
    real = None if column.padding is None else (ids != column.padding).unsqueeze(-1)
    if column.wrap_negative:
        ids = torch.where(ids < 0, ids + table.shape[0], ids)
    embedded = embedding(ids.long(), table, padding_idx=column.frozen)  # [rows, L, D]
    if column.pool == "none":
        return embedded.flatten(1)
    if column.weights is not None:
        embedded = embedded * read(tensors, column.weights, rows).unsqueeze(-1)
    if kept is not None:
        embedded = _masked(column, embedded, kept.unsqueeze(-1))
    if column.pool == "max":
        return _max(embedded, column, real)
    counted = embedded if real is None else embedded.masked_fill(~real, 0)
    if column.pool == "sum":
        return counted.sum(1)
    total = counted.sum(1, dtype=_at_least_float(counted.dtype) if column.empty_nan else counted.dtype)
    return _mean(total, column, ids.shape[1] if real is None else real.sum(1))


def _masked(column: Column, embedded: Tensor, kept: Tensor) -> Tensor:
    if column.masked == "filled":
        return embedded.masked_fill(~kept, column.masked_value)
    ones = kept.to(embedded.dtype)
    return embedded * ones if column.masked == "scaled" else embedded - (1 - ones) * column.masked_value


def _max(embedded: Tensor, column: Column, real: Tensor | None) -> Tensor:
    if real is not None:
        embedded = embedded.masked_fill(~real, -torch.inf)
    largest = embedded.amax(1) if column.shared_grad else embedded.max(1).values
    return largest if real is None else largest.masked_fill(~real.any(1), 0)


def _mean(total: Tensor, column: Column, count: int | Tensor) -> Tensor:
    if column.empty_nan:
        return total / count
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _bag(tensors: Sequence[Tensor], table: Tensor, column: Column, ids: Tensor, rows: int, check: int | None) -> Tensor:
    bag = column.bag
    assert bag is not None
    offsets = tensors[bag.tensor].long()
    ends = offsets if bag.include_last else F.pad(offsets, (0, 1), value=ids.shape[0])
    begins = ends[bag.segment * rows : (bag.segment + 1) * rows + 1]
    if check is not None:
        _check_offsets(check, begins, ids.shape[0], first=bag.segment == 0)
        _check_last_offset(check, column, table, begins, ids.shape[0])
    position = torch.arange(ids.shape[0], device=ids.device)
    mine = (position >= begins[0]) & (position < begins[-1])
    if check is not None:
        check_ids(check, column, torch.where(mine, ids, 0), table.shape[0], begins)
    kept = mine if column.padding is None else mine & (ids != column.padding)
    if column.wrap_negative:
        ids = torch.where(ids < 0, ids + table.shape[0], ids)
    ids = torch.where(mine, ids.long(), 0)
    weights = None
    if column.weights is not None:
        weights = read(tensors, column.weights, ids.shape[0]).flatten().to(table.dtype)
    return _bag_reduce(table, column, ids, begins, kept, weights)


def _bag_reduce(
    table: Tensor, column: Column, ids: Tensor, begins: Tensor, kept: Tensor, weights: Tensor | None
) -> Tensor:
    # F.embedding_bag wants offsets from 0 to the last id, or its gradients are not those of these bags alone. What
    # other features own before the first bag, and behind the last, become bags of their own.
    offsets = F.pad(F.pad(begins, (1, 0)), (0, 1), value=ids.shape[0])
    weighted_mean = weights is not None and column.pool == "mean"
    result = embedding_bag(
        ids,
        table.float() if column.pool == "max" and table.element_size() == 2 else table,
        offsets,
        mode="sum" if weighted_mean else column.pool,
        per_sample_weights=weights,
        include_last_offset=True,
        padding_idx=column.padding,
    )[1:-1]
    if column.pool == "mean" and (weighted_mean or column.empty_nan):
        total = F.pad(kept.long().cumsum(0), (1, 0))
        count = (total[begins[1:]] - total[begins[:-1]]).unsqueeze(1)
        if weighted_mean:
            result = result / count.clamp(min=1)
        if column.empty_nan:
            result = result.masked_fill(count == 0, torch.nan)
    return result


def _check_offsets(index: int, begins: Tensor, n: int, first: bool) -> None:
    starts = not first or len(begins) == 0 or begins[0] == 0
    if not starts or (begins.diff() < 0).any() or (begins < 0).any() or (begins > n).any():
        raise RuntimeError(
            f"column {index}: offsets must start at 0, grow and stay within {n} ids, found {begins.tolist()[:8]}..."
        )


def _check_last_offset(index: int, column: Column, table: Tensor, begins: Tensor, n: int) -> None:
    """Where it is not the number of ids, F.embedding_bag counts the rest in the last bag, but for plain sums."""
    assert column.bag is not None
    sums = column.pool == "sum" and column.weights is None and column.padding is None
    plain = sums and table.dtype != torch.float64 and table.stride(1) == 1
    if plain or len(begins) < 2 or not column.bag.include_last or column.bag.segments != 1 or begins[-1] == n:
        return
    found = int(begins[-1])
    raise RuntimeError(f"column {index}: expected the last offset to be the number of ids, {n}, found {found}")


def check_ids(index: int, column: Column, ids: Tensor, rows: int, begins: Tensor | None = None) -> None:
    """Raises in the kernel's words for the first id outside the table."""
    if ids.is_floating_point():
        raise RuntimeError(f"column {index}: ids must be integers after the program")
    bad = (ids >= rows) | (ids < (-rows if column.wrap_negative else 0))
    if not bad.any():
        return
    row, lane = bad.nonzero()[0].tolist() if begins is None else (0, int(bad.flatten().nonzero()[0]))
    value = int(ids[row, lane]) if begins is None else int(ids.flatten()[lane])
    if begins is not None:
        position = lane
        row = int(torch.searchsorted(begins.contiguous(), position, right=True)) - 1
        lane = position - int(begins[row])
    raise RuntimeError(f"fxopt-bad-id column={index} row={row} lane={lane} value={value} rows={rows}")
