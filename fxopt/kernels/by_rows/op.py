"""Packed computations and large batches: chunks of rows, or the loop that was packed.

A loop of small operators costs 1.3 us a call and keeps its tensors in the cache; packed, it costs one call, and
tensors that may not fit. The sum of 325 products of fields, dim 16: packed 0.05 / 0.6 / 82 ms at batch 1 / 256 / 4096
(where most is the kernel handing out zeroed pages), in chunks 9.4 ms, the loop 1.3 / 1.6 / 7.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from fxopt.torch_internals.dynamo import is_exporting
from fxopt.torch_internals.exporting import either_of

from .many import are_many, at_a_time

# (dim, times): row b takes the indices [b * times, (b + 1) * times) of the dim; None: as many as there are for each row
Cut = tuple[int, int | None]
_CHUNK = 1 << 22  # bytes; 325 wide products at batch 4096: 149, 87, 72, 59 ms with 2**18, 2**20, 2**21, 2**22
_FEWEST_ROWS = 16
_BYTES_A_CALL = 52_000  # a call's 1.3 us at 0.025 ns a byte, by which packed results are slower than the loop's


def in_chunks(function: Callable[..., Tensor], split: Sequence[bool], bytes_per_row: int) -> Callable[..., Tensor]:
    """`function` on some rows at a time; the same values, in the same order.

    Args:
        function: from tensors to one tensor, row by row: row b of the result depends on row b of the inputs.
        split: which inputs have rows, on dim 0; every chunk gets the others as they are.
        bytes_per_row: of the widest intermediate result.
    """
    cuts = [(0, 1) if has_rows else None for has_rows in split]
    rows = max(_FEWEST_ROWS, _CHUNK // max(1, bytes_per_row))
    chunked = some_rows_at_a_time(lambda *inputs: (function(*inputs),), cuts, (0,), rows)
    return lambda *inputs: chunked(*inputs)[0]


def some_rows_at_a_time(
    function: Callable[..., Sequence[Tensor]], cuts: Sequence[Cut | None], joins: Sequence[int], rows: int
) -> Callable[..., Sequence[Tensor]]:
    """`function` on `rows` rows at a time where there are more than twice as many.

    Args:
        function: from tensors to tensors, row by row.
        cuts: where each input has its rows; None: every chunk gets it as it is. One at least tells its times.
        joins: the dim of each result on which its rows are joined.
    """
    first, dim, times = next((number, cut[0], cut[1]) for number, cut in enumerate(cuts) if cut and cut[1])
    most = 2 * rows

    def chunked(*inputs: Any) -> Sequence[Tensor]:
        size = inputs[first].shape[dim] // times
        if _in_program(size) or not are_many(size, most):  # a program has no loops over sizes
            return function(*inputs)
        counts = _chunks(size, at_a_time(size, rows))

        def pieces(value: Any, cut: Cut | None) -> Sequence[Any]:
            if cut is None or not value.shape[cut[0]]:
                return (value,) * len(counts)
            each = cut[1] or value.shape[cut[0]] // size
            return value.split([count * each for count in counts], cut[0])

        columns = map(pieces, inputs, cuts)
        results = [function(*chunk) for chunk in zip(*columns, strict=True)]
        return [torch.cat(parts, join) for parts, join in zip(zip(*results, strict=True), joins, strict=True)]

    return chunked


def _chunks(size: int, step: int) -> list[int]:
    """Rows of each chunk, never a single one: `squeeze()` would drop that dim, and sizes of 1 are broadcast."""
    counts = [step] * (size // step)
    rest = size - sum(counts)
    if rest == 1:
        counts[-1] += 1
    return [*counts, rest] if rest > 1 else counts


def unless_many(
    packed: Callable[..., Tensor], loop: Callable[..., Tensor], split: Sequence[bool], calls: int, bytes_per_row: int
) -> Callable[..., Tensor]:
    """`packed` for few rows and `loop`, which computes the same, for many.

    Args:
        split: which inputs have rows, on dim 0.
        calls: operators in the loop.
        bytes_per_row: of all packed results together.
    """
    return up_to(calls * _BYTES_A_CALL // max(1, bytes_per_row), packed, loop, list(split).index(True), 0)


def _in_program(size: Any) -> bool:
    """Whether a program is made for this size and others: by torch.export, or in a branch of torch.cond by Dynamo."""
    return is_dynamo_compiling() or (type(size) is not int and is_exporting())


def _own(branch: Callable[..., Any]) -> Callable[..., Any]:
    """A branch whose results are no views, of its inputs or of each other, as torch.cond wants it."""
    return lambda *inputs: tree_map_only(Tensor, torch.clone, branch(*inputs))


def up_to(most: int, few: Callable[..., Any], many: Callable[..., Any], position: int, dim: int) -> Callable[..., Any]:
    """`few` where the input at `position` has at most `most` elements in `dim`, and `many` for more."""

    def either(*inputs: Any) -> Any:
        size = inputs[position].shape[dim]
        if _in_program(size):
            return either_of(size <= most, _own(few), _own(many), inputs)
        return many(*inputs) if are_many(size, most) else few(*inputs)

    return either
