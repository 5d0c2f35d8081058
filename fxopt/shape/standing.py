"""Analyses of a graph that nobody edits meanwhile: each is made once, whichever pattern asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import Graph

T = TypeVar("T")
_known: WeakKeyDictionary[Graph, dict[Callable[[Graph], Any], Any]] = WeakKeyDictionary()
_read: ContextVar[Graph | None] = ContextVar("the graph that stands still", default=None)


@contextmanager
def reading(graph: Graph) -> Iterator[None]:
    """In here nobody edits the graph. What is found out about it is kept for the next reading, until `edited`."""
    before = _read.set(graph)
    try:
        yield
    finally:
        _read.reset(before)


def edited(graph: Graph) -> None:
    """Forgets what was known of a graph."""
    _known.pop(graph, None)


def analysed(graph: Graph, analysis: Callable[[Graph], T]) -> T:
    """`analysis(graph)`; the one that another pattern has asked for, in a reading of this graph."""
    if _read.get() is not graph:
        return analysis(graph)
    known = _known.setdefault(graph, {})
    if analysis not in known:
        known[analysis] = analysis(graph)
    return known[analysis]
