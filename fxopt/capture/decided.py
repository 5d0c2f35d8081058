"""What a trace took for granted about numbers that depend on data, as calls of the graph that ask it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from fxopt.capture.errors import CaptureError
from fxopt.capture.proofs import ITEMS
from fxopt.shape.conditions import arguments, as_number, require
from fxopt.torch_internals.symbols import recorded_term

aten = torch.ops.aten
Source = tuple[Node, int | None]  # a number, or a tensor and its dim
_NUMBERS = ITEMS | {aten.select.int, aten.unbind.int, aten.sym_size.int}


def keep_decisions(graph: Graph, decided: dict[sympy.Basic, None]) -> None:
    """Ask each condition where its last number is known: in front of all that is computed from it.

    Raises:
        CaptureError: a number is not to be had.
    """
    if not decided:
        return
    has_side_effect(require)
    sources, order = sources_of(graph), {node: place for place, node in enumerate(graph.nodes)}
    together: dict[Node, dict[sympy.Basic, None]] = {}
    for term in decided:
        if is_made_up(term, sources):
            continue
        if not term.free_symbols <= sources.keys():
            raise CaptureError("depends on data")
        last = max((sources[symbol][0] for symbol in term.free_symbols), key=order.__getitem__)
        together.setdefault(_behind(last), {})[term] = None
    for place, terms in together.items():
        _ask(graph, place, terms, sources)


def sources_of(graph: Graph) -> dict[sympy.Symbol, Source]:
    """Where each symbol is known first."""
    found: dict[sympy.Symbol, Source] = {}
    for node in graph.nodes:
        for number, dim in _numbers(node):
            term = as_number(recorded_term(number))
            if term.is_Symbol:
                found.setdefault(term, (node, dim))
    return found


def _numbers(node: Node) -> Iterator[tuple[Any, int | None]]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                yield size, dim
    elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        yield value, None


def is_made_up(term: sympy.Basic, sources: dict[sympy.Symbol, Source]) -> bool:
    """Whether it only says that a size, or a place in memory (which has no source), is not negative."""
    if not (isinstance(term, sympy.Ge) and term.lhs.is_Symbol and term.rhs == 0):
        return False
    return term.lhs not in sources or sources[term.lhs][1] is not None


def _behind(node: Node) -> Node:
    """The last of the reads of numbers that follow: conditions on a list of items are one question."""
    while node.next.target in _NUMBERS or (node.op == "placeholder" and node.next.op == "placeholder"):
        node = node.next
    return node


def _ask(graph: Graph, place: Node, terms: dict[sympy.Basic, None], sources: dict[sympy.Symbol, Source]) -> None:
    symbols = sorted({symbol for term in terms for symbol in term.free_symbols}, key=str)
    with graph.inserting_after(place):
        node = graph.call_function(require)
    with graph.inserting_before(node):
        numbers = {symbol: _read(graph, *sources[symbol]) for symbol in symbols}
    node.args = arguments(terms, numbers)
    node.meta.update(val=None, terms=tuple(terms), symbols=tuple(symbols))
    if "place" in place.meta:
        node.meta["place"] = place.meta["place"]


def _read(graph: Graph, node: Node, dim: int | None) -> Node:
    if dim is None:
        return node
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size
