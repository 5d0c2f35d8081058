"""Analyses of a graph that nobody edits meanwhile: each is made once, whichever pattern asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.fx import Graph

T = TypeVar("T")


@dataclass
class _Known:
    """What was found out about a graph. `read`: patterns read it at the moment, and nobody edits it."""

    graph: Graph
    found: dict[Callable[[Graph], Any], Any] = field(default_factory=dict)
    read: bool = False


_known: ContextVar[_Known | None] = ContextVar("what is known of the graph that passes run over", default=None)


@contextmanager
def remembered(graph: Graph) -> Iterator[None]:
    """In here analyses of the graph are kept from one `reading` to the next, until `edited`."""
    before = _known.set(_Known(graph))
    try:
        yield
    finally:
        _known.reset(before)


@contextmanager
def reading(graph: Graph) -> Iterator[None]:
    """In here nobody edits the graph."""
    if (known := _of(graph)) is None:
        yield
        return
    known.read = True
    try:
        yield
    finally:
        known.read = False


def edited(graph: Graph) -> None:
    """Forgets what was known of a graph."""
    if known := _of(graph):
        known.found.clear()


def analysed(graph: Graph, analysis: Callable[[Graph], T]) -> T:
    """`analysis(graph)`; the one that another pattern has asked for, in a reading of this graph."""
    known = _of(graph)
    if known is None or not known.read:
        return analysis(graph)
    if analysis not in known.found:
        known.found[analysis] = analysis(graph)
    return known.found[analysis]


def _of(graph: Graph) -> _Known | None:
    known = _known.get()
    return known if known is not None and known.graph is graph else None
