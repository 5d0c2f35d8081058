"""While a model is looked at, nothing of it is compiled by torch.compile.

Dynamo compiles nothing under a dispatch mode, and what it comes across there it never compiles again, in the whole
process: torch.compile would lose its effect, and torch.cond and flex_attention, which compile themselves, would raise
from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxopt.locks import in_child, lock
from fxopt.torch_internals.dynamo import force_eager, set_stance, watch_frames

_lock = lock()
_looking: list[int] = []  # threads
_before: list[Any] = []  # the stance ahead of the first one's look


def begin() -> None:
    """Until `Before.restore`, and that of all that look beside this thread."""
    with _lock:
        stance = force_eager()
        if not _looking:
            _before[:] = [stance]
        _looking.append(threading.get_ident())


class Before:
    """Whether this thread looks at a model, and who is shown its frames: nobody, until that is restored."""

    def __init__(self) -> None:
        self._depth = _looking.count(threading.get_ident())
        self._watcher = watch_frames(None)

    def restore(self) -> None:
        with _lock:
            for _ in range(_looking.count(threading.get_ident()) - self._depth):
                _looking.remove(threading.get_ident())
            if not _looking and _before:
                set_stance(_before.pop())
        watch_frames(self._watcher)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """For a look by itself; all that belongs to a capture is within `settings.kept`."""
    before = Before()
    try:
        begin()
        yield
    finally:
        before.restore()


def _end_all() -> None:
    _looking.clear()
    if _before:
        set_stance(_before.pop())


in_child(_end_all)
