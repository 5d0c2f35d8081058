"""What a thread prints, handed to somebody else for a while. Other threads see no difference."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_instead: dict[int, Callable[..., None]] = {}  # by thread
_lock = threading.Lock()
_print: Callable[..., None] = builtins.print


def _dispatched(*args: Any, **kwargs: Any) -> None:
    _instead.get(threading.get_ident(), _print)(*args, **kwargs)


@contextlib.contextmanager
def printing(instead: Callable[..., None]) -> Iterator[None]:
    """This thread's `print` is `instead`."""
    global _print
    here = threading.get_ident()
    with _lock:
        if not _instead:
            _print, builtins.print = builtins.print, _dispatched
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
