"""What long work is at: whoever does it says so with `step`, and whoever wants to show it listens."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Listener = Callable[[str], None]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("fxopt_progress", default=None)
_PATIENCE = 1.0  # seconds before anything is shown, and between two lines of a log


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


def heard(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for another thread: who listens here hears its steps."""
    return functools.partial(contextvars.copy_context().run, function)


@contextlib.contextmanager
def on_terminal(wanted: bool | None) -> Iterator[None]:
    """Shows on stderr what the work is at, from its second second on, unless somebody listens already.

    A terminal has one line that changes. A log, where it is wanted, gets a line each second.

    Args:
        wanted: None: where stderr is a terminal.
    """
    shown = sys.stderr.isatty() if wanted is None else wanted
    if not shown or _listener.get() is not None:
        yield
        return
    line = _Line()
    line.start()
    try:
        with told(line.tell):
            yield
    finally:
        line.stop()


class _Line(threading.Thread):
    """Says each second what the latest step is, and since when."""

    def __init__(self) -> None:
        super().__init__(name="fxopt-progress", daemon=True)
        self._over = threading.Event()
        self._latest = "start", time.monotonic()

    def tell(self, text: str) -> None:
        self._latest = text, time.monotonic()

    def run(self) -> None:
        if self._over.wait(_PATIENCE):
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True)
        if not console.is_terminal:
            self._each_second(lambda text: print(text, file=sys.stderr, flush=True))
            return
        with console.status("") as status:
            self._each_second(lambda text: status.update(Text(text)))

    def _each_second(self, show: Callable[[str], object]) -> None:
        show(self._text())
        while not self._over.wait(_PATIENCE):
            show(self._text())

    def _text(self) -> str:
        text, since = self._latest
        return f"fxopt: {text}, {time.monotonic() - since:.0f} s"

    def stop(self) -> None:
        self._over.set()
        self.join()
