"""Rows in chunks at the sizes that random graphs have: fxopt cuts large batches alone, and no random batch is large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxopt.kernels.by_rows import op as by_rows
from fxopt.rewrites import row_chunks

_SIZES = tuple((module, name, getattr(module, name)) for module, name in (
    (by_rows, "_CHUNK"), (by_rows, "_FEWEST_ROWS"), (row_chunks, "ROWS"),
))  # fmt: skip


@contextmanager
def rows_cut(one_by_one: bool) -> Iterator[None]:
    """As :func:`cut_rows`, for what is inside."""
    cut_rows(one_by_one)
    try:
        yield
    finally:
        cut_rows(False)


def cut_rows(one_by_one: bool) -> None:
    """Whether captures from now on compute more than two rows one by one, wherever rows do not mix."""
    for module, name, size in _SIZES:
        setattr(module, name, 1 if one_by_one else size)
