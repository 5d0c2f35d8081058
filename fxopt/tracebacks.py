"""Errors that were answered, and what their tracebacks hold."""

from __future__ import annotations

import traceback


def let_go(error: BaseException | None) -> None:
    """Frames that an error went through are in cycles with it, and would keep a model until these are collected."""
    waiting = [error]
    while waiting:
        if (each := waiting.pop()) is not None and each.__traceback__ is not None:
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
            waiting += [each.__cause__, each.__context__]
