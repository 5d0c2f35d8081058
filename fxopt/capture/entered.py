"""The functions that a trace may not enter: they use what can be neither seen nor put back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from fxopt.capture.errors import CaptureError
from fxopt.capture.places import Places
from fxopt.tracebacks import let_go


@contextlib.contextmanager
def entering_none(barred: Mapping[CodeType, str]) -> Iterator[None]:
    """A call of a function with this code in this thread ends what runs here, before anything in the function does.

    Args:
        barred: what the function may do, by its code.

    Raises:
        CaptureError: one is called, or another profiler is at work, beside which nobody can tell.
    """
    if not barred:
        yield
        return
    if sys.getprofile() is not None:
        raise CaptureError(f"forward may {next(iter(barred.values()))}; a profiler hides whether it does")
    entered: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in barred:
            entered.append(barred[frame.f_code])
            raise _Entered  # which ends the profiling, too

    sys.setprofile(look)
    try:
        yield
    except (_Entered, Exception) as error:
        if not entered:
            raise
        place = Places({}).of_error(error)[1]
        let_go(error)
        raise CaptureError(f"may {entered[0]}", place) from None
    finally:
        sys.setprofile(None)
    if entered:  # and caught
        raise CaptureError(f"may {entered[0]}")


class _Entered(BaseException):
    """Passes by what a forward catches, and by what a capture tries next."""
