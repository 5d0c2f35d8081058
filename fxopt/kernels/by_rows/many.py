"""Few rows computed as many are: how verification sees what only large batches run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PIECES = 3  # two of one size, and what is left


@dataclass
class Look:
    """asked: whether anything has another way for many rows. pretended: whether that way is taken from two rows on."""

    pretended: bool
    asked: bool = False


_look: ContextVar[Look | None] = ContextVar("fxopt_many_rows", default=None)


@contextmanager
def looking(pretended: bool) -> Iterator[Look]:
    """What is computed inside, in this thread, tells whether many rows are computed in another way; or takes it."""
    token = _look.set(look := Look(pretended))
    try:
        yield look
    finally:
        _look.reset(token)


def are_many(rows: int, most: int) -> bool:
    """Whether these are more than `most` rows, or stand for more."""
    return rows > most or (_look.get() is not None and _stand_for_more(rows))  # at each call of a graph


def at_a_time(rows: int, most: int) -> int:
    """How many of `rows` to compute at a time, where it may be `most`."""
    return max(2, rows // _PIECES) if rows <= most and _stand_for_more(rows) else most


def _stand_for_more(rows: int) -> bool:
    look = _look.get()
    if look is None or rows < 2:
        return False
    look.asked = True
    return look.pretended
