"""What long work is at: whoever does it says so with `step`, and whoever wants to show it listens."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator

Listener = Callable[[str], None]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("fxopt_progress", default=None)
_PATIENCE = 1.0  # seconds before a terminal hears of it


def step(text: str) -> None:
    """Says what begins now, as in "compile fxopt_mlp". Costs 50 ns where nobody listens."""
    if (listener := _listener.get()) is not None:
        listener(text)


@contextlib.contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Every step in this context goes to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def on_terminal(wanted: bool | None) -> Iterator[None]:
    """A line on stderr that shows the latest step of what takes more than a second, unless somebody listens already.

    Args:
        wanted: None: where stderr is a terminal.
    """
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown or _listener.get() is not None:
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status("fxopt")
    late = threading.Timer(_PATIENCE, status.start)
    late.daemon = True
    late.start()
    try:
        with told(lambda text: status.update(f"fxopt: {text}")):
            yield
    finally:
        late.cancel()
        late.join()
        status.stop()
