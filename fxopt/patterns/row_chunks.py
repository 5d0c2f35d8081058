"""The largest part of a graph that works row by row: it can be computed some rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import Aliases, has_effects, is_random
from fxopt.shape.calls import ancestors, closure
from fxopt.shape.placements import Count, Fixed, Placement, Placements, Rows
from fxopt.shape.rows import batch_symbol, rows_of
from fxopt.shape.standing import analysed
from fxopt.shape.strides import Strides, looks_contiguous

FEWEST = 4  # operators; fewer are not worth a loop in Python
_MOST_INPUTS = 48  # tensors to cut; each costs 0.5 us a chunk


@dataclass(frozen=True)
class RowRegion:
    """inside: nodes in graph order; reads, outputs: with where their rows are (None: all rows share it)."""

    inside: Sequence[Node]
    reads: Sequence[tuple[Node, Rows | None]]
    outputs: Sequence[tuple[Node, Rows]]


def find_row_chunks(search: Search) -> Iterator[Match | Reject]:
    """One match a graph, at its output."""
    graph = search.graph
    (output,) = graph.find_nodes(op="output")
    batch = batch_symbol([node.meta.get("val") for node in graph.find_nodes(op="placeholder") if "input" in node.meta])
    if not search.inference or batch is None:
        return
    if any(
        isinstance(value := node.meta.get("val"), torch.Tensor) and value.device.type != "cpu" for node in graph.nodes
    ):
        yield Reject("it is on another device, where memory is not asked of the system", output)
        return
    if any(has_effects(node) or is_random(node) for node in graph.nodes if node.op == "call_function"):
        yield Reject("it edits memory, draws random numbers or asks about data: rows cannot be computed apart", output)
        return
    aliases = analysed(graph, Aliases)
    if editing := next((leaf for leaf in graph.find_nodes(op="call_module") if _may_be_seen(leaf, aliases)), None):
        yield Reject("it may edit what others read: nothing moves past it", editing)
        return
    ahead, behind, placements = _parted(graph, batch)
    region = _closed(graph, placements, ahead, behind, aliases)
    cut = [place for _, place in region.reads if place is not None]
    if _operators(region.inside) < FEWEST:
        for mixing in (*ahead, *behind)[:1]:
            yield Reject(f"'{mixing.name}' may mix the rows of the batch: they are computed all at once", mixing)
    elif any(isinstance(placements[node], Count) for node, _ in region.reads):
        yield Reject("a size of the batch comes from what must run before", output)
    elif not any(place.known_times for place in cut):
        yield Reject("no tensor tells how many rows there are", output)
    elif len(cut) > _MOST_INPUTS:
        yield Reject(f"expected at most {_MOST_INPUTS} tensors with rows, found {len(cut)}", output)
    else:
        readers = {user for node, _ in region.outputs for user in node.users}.difference(region.inside)
        yield Match(next(node for node in graph.nodes if node in readers), {"region": region})


def _may_be_seen(leaf: Node, aliases: Aliases) -> bool:
    """Whether the memory that an opaque module is handed is read by who does not wait for the module."""
    memory = {node for handed in leaf.all_input_nodes for node in aliases.sharing(handed)}
    readers = {user for node in memory for user in node.users}
    return not readers <= memory | closure([leaf], lambda node: node.users)


def _parted(graph: Graph, batch: sympy.Symbol) -> tuple[list[Node], list[Node], Placements]:
    """(ahead, behind, placements): the nodes that may mix rows, each with the smaller part of the graph on its side."""
    ahead, behind = list[Node](), list[Node]()
    while True:
        placements = rows_of(graph, batch, frozenset(ahead))
        unsettled = (node for node in graph.nodes if _mixes(node, placements, ahead) and node not in behind)
        mixing = next(unsettled, None)
        if mixing is None:
            return ahead, behind, placements
        needed, needing = ancestors([mixing]), closure([mixing], lambda node: node.users)
        if mixing in ahead:  # even by its sizes nothing is known of it
            ahead.remove(mixing)
            behind.append(mixing)
        elif _operators(needed) < _operators(needing) and not needed.intersection(behind):
            ahead.append(mixing)
        else:
            behind.append(mixing)


def _mixes(node: Node, placements: Placements, ahead: Sequence[Node]) -> bool:
    """Whether a node is the first about which nothing is known, or an opaque module on neither side yet."""
    if node.op == "call_module":
        return node not in ahead
    if node.op != "call_function" or placements[node] is not None:
        return False
    return all(placements[needed] is not None for needed in node.all_input_nodes)


def _operators(nodes: Iterable[Node]) -> int:
    return sum(
        node.meta.get("calls", isinstance(node.target, OpOverload) and not node.target.is_view) for node in nodes
    )


def _closed(
    graph: Graph, placements: Placements, ahead: Sequence[Node], behind: Sequence[Node], aliases: Aliases
) -> RowRegion:
    """What depends on the batch and keeps its rows apart, less what must run ahead of it or behind it.

    Behind runs too what is a view of its own results or of what it reads, and would not be one of joined rows.
    """
    strides = analysed(graph, Strides)
    early, late = ancestors(ahead), set(behind)
    while True:
        for node in graph.nodes:
            if node.op == "call_function" and late.intersection(node.all_input_nodes):
                late.add(node)
        members = set[Node]()
        for node in graph.nodes:
            if node.op == "call_function" and _is_inside(node, placements[node], early, late, members):
                members.add(node)
        _drop_sizes(members, graph, placements)
        reads = {needed: placements[needed] for node in sorted(members) for needed in node.all_input_nodes}
        reads = {node: place for node, place in reads.items() if node not in members}
        items = {
            node for node in members if any(source in reads and _is_list(source) for source in node.all_input_nodes)
        }
        if items:
            early |= items
            continue
        outputs = [node for node in graph.nodes if node in members and any(user not in members for user in node.users)]
        unfit = [node for node in outputs if not _joins(node, placements[node], aliases, strides, reads)]
        if not unfit:
            inside = [node for node in graph.nodes if node in members]
            cuts = [(node, place if isinstance(place, Rows) else None) for node, place in reads.items()]
            return RowRegion(inside, cuts, [(node, placements[node]) for node in outputs])  # type: ignore[misc]
        late.update(unfit)


def _is_inside(node: Node, place: Placement | None, early: set[Node], late: set[Node], members: set[Node]) -> bool:
    """Counts are made anew inside, of the rows that are there, even where they are needed ahead.

    What all rows share is inside where it comes from there, as the size of another dim does.
    """
    if node in late or place is None:
        return False
    if isinstance(place, Count):
        return True
    return node not in early and not (isinstance(place, Fixed) and members.isdisjoint(node.all_input_nodes))


def _is_list(node: Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)


def _drop_sizes(members: set[Node], graph: Graph, placements: Placements) -> None:
    """Sizes that are read elsewhere alone, and calls whose results nobody needs."""
    for node in reversed(graph.nodes):
        if node in members and not isinstance(placements[node], Rows) and not members.intersection(node.users):
            members.discard(node)


def _joins(
    node: Node,
    place: Placement | None,
    aliases: Aliases,
    strides: Strides,
    reads: Mapping[Node, Placement | None],
) -> bool:
    """Whether joined rows of its chunks are what it was: a tensor with rows, contiguous, in memory of its own."""
    if not isinstance(place, Rows) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if not looks_contiguous(node) or strides.known(node) < strides.asked(node):
        return False
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    return not is_view and not any(other in reads for other in aliases.sharing(node))
