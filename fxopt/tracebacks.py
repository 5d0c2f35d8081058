"""What the tracebacks of handled errors hold."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def let_go(error: BaseException | None) -> None:
    """Clear the frames of an error that fxopt has handled, and of the errors that led to it.

    They are in cycles with it, and would keep a model until a collection. An error that the caller of fxopt is handling
    is the caller's, with all that led to it; and a generator may be waiting to go on.
    """
    running = set(map(id, _callers()))
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or each.__traceback__ is None or _is_callers(each.__traceback__, running):
            continue
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
        each.__traceback__ = None
        waiting += [each.__cause__, each.__context__]


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_callers(trace: TracebackType, running: set[int]) -> bool:
    """Whether who handles it is still running, and is not fxopt: a traceback begins where the error was caught."""
    return id(trace.tb_frame) in running and not trace.tb_frame.f_globals.get("__name__", "").startswith("fxopt.")
