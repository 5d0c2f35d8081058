"""What an id outside its table raises, and the call that raises it by its column's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from .. import reports
from ..reports import clamped as clamped
from .encode import known_plan
from .op import columns
from .plan import Plan

_BAD_ID = re.compile(r"fxopt-bad-id column=(\d+) row=(\d+) lane=(\d+) value=(-?\d+) rows=(\d+)(?: plan=(\d+))?")
_OFFSETS = re.compile(r"column (\d+): (offsets of bag (\d+) are \[(-?\d+), .*? ids)")
_LATE = "fxopt-late "
_NO_PLAN = Plan((), (), ())


class BadId(IndexError):
    """An id outside its table; the text names column, table, rows, value and position.

    late: an earlier call on a GPU met it, and the call that raises this may be as it should.
    of_data: the call has bad inputs, and the graph may be as it should.
    """

    late, of_data = False, True


class LateError(RuntimeError):
    """What an earlier call on a GPU reported that is not about an id."""

    late = True


class BadBagId(BadId, RuntimeError):
    """The same where torch raises RuntimeError (embedding_bag, one_hot), so that either `except` still works."""


class BadOffsets(RuntimeError):
    """Offsets of bags that fall or leave the ids. Torch's embedding_bag, which checks the ends alone, reads by them."""

    unsafe = True


def explain(error: BaseException, plan: Plan) -> BadId | BadOffsets | LateError | None:
    """What to raise for the kernel's `error`; None for an error of this call that torch raises as well."""
    text = str(error)
    if text.startswith(_LATE):
        return LateError(text.removeprefix(_LATE))
    offsets = _OFFSETS.search(text)
    if offsets is not None and (offsets[3] != "0" or offsets[4] == "0"):
        name = plan.columns[int(offsets[1])].name or f"column {offsets[1]}"
        return BadOffsets(f"{name}: {offsets[2]}")
    found = _BAD_ID.search(text)
    if found is None:
        return None
    index, row, lane, value, rows = map(int, found.groups()[:5])
    if found[6]:  # on CUDA it may be an earlier call's, of another plan
        plan = known_plan(int(found[6])) or plan
    column = plan.columns[index]
    name = column.name or f"column {index}"
    table = f"table {column.table_name!r}" if column.table_name else f"table {column.table}"
    single = (column.bag is None or column.pool == "none") and column.source.lane is None
    place = f"row {row}" if single else f"row {row}, position {lane}"
    kind = BadBagId if column.runtime_error else BadId
    explained = kind(f"{name}: id {value} at {place} is outside {table} with {rows} rows")
    explained.late = found[6] is not None
    return explained


def check(device: int = 0) -> None:
    """Waits for a CUDA device and raises BadId if a call of `columns` met a bad id there since the last look.

    A bad id on CUDA is otherwise raised by the next call of `columns`; until then its rows are NaN.
    """
    text = reports.failure(device)
    if text:
        error = RuntimeError(text)
        raise explain(error, _NO_PLAN) or error


def raise_reported(device: int = 0) -> None:
    """As :func:`check`, for what a CUDA device has told by now: it does not wait."""
    if reports.reported(device):
        check(device)


def call_of(plan: Plan) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], list[Tensor]]:
    """`columns` for one plan, with its errors explained."""

    def fxopt_columns(tensors: Sequence[Tensor], tables: Sequence[Tensor], encoded: Tensor) -> list[Tensor]:
        try:
            return columns(tensors, tables, encoded)
        except RuntimeError as error:
            raise explain(error, plan) or error from None

    fxopt_columns.reads_in_place = True  # type: ignore[attr-defined]  # any sequence of tensors, picked ones too
    return fxopt_columns
