"""A bar on stderr for what takes long."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fxopt import progress


@contextlib.contextmanager
def bar(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, only on a terminal; the function it gives begins the next step, beside which inner ones show."""
    console = Console(stderr=True)
    text, steps_done = TextColumn("{task.description}"), MofNCompleteColumn()
    columns = (SpinnerColumn(), text, BarColumn(20), steps_done, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task, done = shown.add_task("start", total=steps), itertools.count()

        def begin(description: str) -> None:
            shown.update(task, description=description, completed=next(done))

        with progress.told(lambda inner: shown.update(task, description=inner)):
            yield begin
