"""What a thread prints and logs, handed to somebody else for a while. Other threads see no difference."""

from __future__ import annotations

import builtins
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxopt.names import is_users

_instead: dict[int, Callable[..., None]] = {}  # by thread
_lock = threading.Lock()
_print: Callable[..., None] = builtins.print
_handle: Callable[..., None] = logging.Logger.handle


def _dispatched(*args: Any, **kwargs: Any) -> None:
    _instead.get(threading.get_ident(), _print)(*args, **kwargs)


def _handled(logger: logging.Logger, record: logging.LogRecord) -> None:
    instead = _instead.get(threading.get_ident())
    if instead is not None and is_users(logger.name):
        instead(record.getMessage())
    else:
        _handle(logger, record)


@contextlib.contextmanager
def printing(instead: Callable[..., None]) -> Iterator[None]:
    """What this thread prints or gives to loggers of users goes to `instead`."""
    global _print, _handle
    here = threading.get_ident()
    with _lock:
        if not _instead:
            _print, builtins.print = builtins.print, _dispatched
            _handle, logging.Logger.handle = logging.Logger.handle, _handled  # type: ignore[method-assign,assignment]
        before = _instead.get(here)
        _instead[here] = instead
    try:
        yield
    finally:
        with _lock:
            if before is not None:
                _instead[here] = before
            else:
                del _instead[here]
            if not _instead:
                builtins.print = _print
                logging.Logger.handle = _handle  # type: ignore[method-assign]
