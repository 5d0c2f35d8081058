"""What a thread prints and logs, handed to somebody else for a while. Other threads see no difference."""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxopt.names import is_users

_instead: dict[int, Callable[..., None]] = {}  # by thread
_lock = threading.Lock()
_original: dict[tuple[Any, str], Callable[..., Any]] = {}


def _places() -> dict[tuple[Any, str], Callable[..., Any]]:
    """What prints and logs, by owner and name, and what takes its place."""
    places: dict[tuple[Any, str], Callable[..., Any]] = {}
    places[builtins, "print"] = _printed
    places[logging.Logger, "handle"] = _handled
    if (loguru := sys.modules.get("loguru")) is not None:
        places[type(loguru.logger), "_log"] = _logged
    return places


def _printed(*args: Any, **kwargs: Any) -> None:
    _instead.get(threading.get_ident(), _original[builtins, "print"])(*args, **kwargs)


def _handled(logger: logging.Logger, record: logging.LogRecord) -> None:
    instead = _instead.get(threading.get_ident())
    if instead is not None and is_users(logger.name):
        instead(record.getMessage())
    else:
        _original[logging.Logger, "handle"](logger, record)


def _logged(logger: Any, level: Any, from_decorator: bool, options: Any, message: Any, *rest: Any) -> None:
    """Of loguru, which looks for its caller so many frames above."""
    instead = _instead.get(threading.get_ident())
    if instead is not None:
        instead(message)
        return
    exception, depth, *others = options
    options = (exception, depth + 1, *others)
    _original[type(logger), "_log"](logger, level, from_decorator, options, message, *rest)


@contextlib.contextmanager
def printing(instead: Callable[..., None]) -> Iterator[None]:
    """What this thread prints or gives to loggers of users goes to `instead`."""
    here = threading.get_ident()
    with _lock:
        if not _instead:
            for (owner, name), function in _places().items():
                _original[owner, name] = getattr(owner, name)
                setattr(owner, name, function)
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
                for (owner, name), function in _original.items():
                    setattr(owner, name, function)
