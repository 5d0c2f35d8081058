"""The backward of fxopt::columns on CUDA: what every id gives, sorted by table and row, and added up by one kernel.

The order of additions is that of the ids, so the same call gives the same bits.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxopt.torch_internals.operators import foreach_zero_

from ... import cuda_call
from ..encode import plan_of
from ..plan import Column, Plan
from . import call

_CHUNK, _TABLE_SHIFT = 32, 40  # backward.cuh's
_NO_ROW = (1 << _TABLE_SHIFT) - 1
_captured: list[Tensor] = []  # pinned memory that graphs read


@dataclass(frozen=True)
class Entries:
    """What every id gives, sorted by table and row."""

    keys: Tensor
    order: Tensor
    addresses: Tensor
    scales: Tensor

    @classmethod
    def of(cls, grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> Entries:
        keys, addresses, scales = torch.ops.fxopt.columns_entries(grads, tensors, tables, plan)
        return cls(*torch.sort(keys.view(-1), stable=True), addresses, scales)

    def sums(self, targets: list[Tensor], slots: Tensor | None = None) -> tuple[bytes, list[Tensor]]:
        """backward.cuh's Sums, and the memory it points into."""
        n, max_dim = self.keys.numel(), max(target.shape[1] for target in targets)
        known = _uploaded([(target.data_ptr(), target.shape[1]) for target in targets], self.keys.device)
        edges = self.scales.new_empty(2, -(-n // _CHUNK) * max(1, max_dim))
        group_log2 = min(5, max(0, -(-max_dim // 4) - 1).bit_length())
        memory = [self.keys, self.order, self.addresses, self.scales, known, edges]
        pointers = (t.data_ptr() for t in (*memory[:-1], edges[0], edges[1]))
        sums = struct.pack("<9q2iq", *pointers, n, max_dim, group_log2, 0, *cuda_call.addresses(slots))
        return sums, memory if slots is None else [*memory, slots]

    def slots(self, n_tables: int, room: Sequence[int] | None) -> tuple[list[Tensor], Tensor]:
        """The rows [1, U] of each table that are touched, and each entry's place among them.

        Args:
            room: how many rows of each table to give: row 0 stands in for those that are left. None: as many as are
                touched, for which the host waits.
        """
        rows, table = self.keys & _NO_ROW, self.keys >> _TABLE_SHIFT
        first = rows != _NO_ROW
        first[1:] &= self.keys[1:] != self.keys[:-1]
        number = first.cumsum(0)
        table_keys = torch.arange(n_tables + 1, device=rows.device) << _TABLE_SHIFT
        starts = torch.cat([number.new_zeros(1), number])[torch.searchsorted(self.keys, table_keys)]
        room = starts.diff().tolist() if room is None else room
        begins = [0, *itertools.accumulate(room)]
        slots = number - 1 - starts[table]
        places = slots + _uploaded(begins, rows.device)[table]
        touched = rows.new_zeros(begins[-1] + 1)  # and one for all that are not the first of their row
        touched.scatter_(0, torch.where(first, places, begins[-1]), rows)
        return list(touched[None, :-1].split(list(room), 1)), slots


def room_for(
    grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Plan, n: int
) -> list[int] | None:
    """The most rows of each table that the `n` entries of a plan touch, None where only the device can tell."""
    ids = [0] * len(tables)
    for column in plan.columns:
        assert column.table is not None  # no kernel has gradients of others
        if column.bag and column.bag.segments > 1:
            return None
        ids[column.table] += _ids_of(column, grads, tensors)
    return [min(count, table.shape[0]) for count, table in zip(ids, tables, strict=True)] if sum(ids) == n else None


def _ids_of(column: Column, grads: Sequence[Tensor], tensors: Sequence[Tensor]) -> int:
    source, rows = column.source, grads[column.output].shape[0]
    if column.bag is not None and column.pool != "none":
        return tensors[source.tensor].shape[0]
    if source.lane is None:
        return rows
    return rows * (tensors[source.tensor].shape[source.lane] - source.start if source.length is None else source.length)


def _uploaded(numbers: list, device: torch.device) -> Tensor:
    """On the device, without waiting for it. A captured graph copies them again at each replay."""
    given = torch.tensor(numbers, pin_memory=device.type == "cuda", device="cpu")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(given)
    return given.to(device, non_blocking=True)


def backward(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    """fxopt::columns_backward for CUDA: a stable sort by table and row, then sums in the order of the ids.

    Args:
        grads: float32, contiguous, one for each output of the plan.
        plan: of columns that :func:`differentiates` accepts.
    """
    found = [torch.empty_like(table, memory_format=torch.contiguous_format) for table in tables]
    if found:
        foreach_zero_(found)
        _add_up(*Entries.of(grads, tensors, tables, plan).sums(found))
    return found


def row_gradients(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    """fxopt::columns_row_gradients for CUDA, of what :func:`backward` takes: rows [1, U] and gradients [U, D] each.

    Where U would have to be asked of the device, it is the most that there can be, and what is too much is zero.
    """
    if not tables:
        return []
    entries = Entries.of(grads, tensors, tables, plan)
    touched, slots = entries.slots(len(tables), room_for(grads, tensors, tables, plan_of(plan), entries.keys.numel()))
    found = zeros_of([(rows.shape[1], table.shape[1]) for rows, table in zip(touched, tables, strict=True)], tables[0])
    _add_up(*entries.sums(found, slots))
    return list(itertools.chain(*zip(touched, found, strict=True)))


def zeros_of(shapes: Sequence[tuple[int, int]], like: Tensor) -> list[Tensor]:
    """Tensors [U, D] of zeros, cleared at once. Each begins where a vector of four may be read."""
    *begins, size = 0, *itertools.accumulate(-(-rows * dim // 4) * 4 for rows, dim in shapes)
    memory = like.new_zeros(size)
    return [memory.as_strided(shape, (shape[1], 1), begin) for shape, begin in zip(shapes, begins, strict=True)]


def _add_up(sums: bytes, memory: list[Tensor]) -> None:
    call("fxopt_cuda_sums", memory[0].get_device(), sums)


def differentiates(column: Column, dtype: str) -> bool:
    """Whether :func:`backward` serves a column that writes outputs of `dtype`."""
    scaled = (
        column.weights or column.divisor or column.is_masked or (column.pool == "mean" and column.padding is not None)
    )
    return dtype == "float32" and column.pool != "max" and not scaled and bool(column.bag or column.source.rows)
