"""The group: columns, and the dense tensors between them, that one call can write into their collectors.

A collector is a cat or a stack on any dim but the first, or a sum of columns; a column that is itself an output,
or has other users, collects itself. (RECom, ASPLOS'24: all embedding columns in one kernel.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxopt.patterns.core import Reject
from fxopt.patterns.embedding_columns.columns import Columns
from fxopt.patterns.embedding_columns.layout import Layout
from fxopt.patterns.embedding_columns.placed import Column, Placed
from fxopt.shape.aliases import is_pure
from fxopt.shape.sizes import Size, is_tensor, product, same, same_shape, shape_of, static, tensor_of
from fxopt.shape.view_operators import REGROUPS, joined_dim

aten = torch.ops.aten
REORDER_NOTHING = REGROUPS | {aten.contiguous.default}


@dataclass(frozen=True)
class Piece:
    """One column, or a copy of a dense tensor, at an offset of an output's row."""

    placed: Placed | Layout
    offset: int
    add: bool = False


@dataclass(frozen=True)
class Output:
    """One tensor that the call writes. width None: known at run time, one piece only."""

    pieces: tuple[Piece, ...]
    shape: tuple[Size, ...]
    rows: tuple[Size, ...]
    width: int | None
    dtype: torch.dtype

    @property
    def counted(self) -> bool:
        """Whether it has a row for each id of a feature."""
        columns = [piece.placed.column for piece in self.pieces if isinstance(piece.placed, Placed)]
        return any(column.lookup.segment and not column.lookup.bag for column in columns)


@dataclass(frozen=True)
class Collector:
    """`anchor` becomes the one output, or the cat on `dim` of outputs and of what did not fit."""

    anchor: Node
    parts: tuple[Output | Node, ...]
    dim: int = 0

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(part for part in self.parts if isinstance(part, Output))

    @property
    def pieces(self) -> list[Piece]:
        return [piece for output in self.outputs for piece in output.pieces]

    @property
    def columns(self) -> list[Placed]:
        return [piece.placed for piece in self.pieces if isinstance(piece.placed, Placed)]

    @property
    def reads(self) -> list[Node]:
        """Every node that the replacement needs."""
        kept = [part for part in self.parts if isinstance(part, Node)]
        return kept + [node for piece in self.pieces for node in piece.placed.reads]


def find_collectors(graph: Graph, columns: Columns) -> list[Collector]:
    """The collectors that the model's outputs need, in graph order; a column read otherwise collects itself."""
    collectors: dict[Node, Collector] = {}
    for node in graph.nodes:
        collector = _cat(node, columns) or _sum(node, columns)
        if collector is not None:
            collectors[node] = collector
    needed = set()
    unread = [node for node in graph.nodes if node.op == "output" or not is_pure(node)]
    while unread:
        node = unread.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in columns.found and node not in collectors:
            _alone(columns.found[node], columns, collectors)
        unread.extend(collectors[node].reads if node in collectors else node.all_input_nodes)
    return [collectors[node] for node in graph.nodes if node in collectors and node in needed]


def looked_up_again(groups: Sequence[Sequence[Collector]]) -> set[tuple[Node, Node]]:
    """Anchors of collectors, and of columns that these had better copy where gradients are asked for: of tables that
    another call reads, too.

    Each call would make a gradient of the whole table, and autograd would add them up: a step with 26 tables of 4 MB
    takes 32 ms so and 5 ms where the second collector copies the vectors, with tables of 6 KB 0.72 and 0.65 ms (batch
    16, one core).
    """
    first: dict[Node, int] = {}
    again = set()
    for number, members in enumerate(groups):
        for collector in members:
            for column in (placed.column for placed in collector.columns):
                if first.setdefault(column.lookup.table, number) != number and column.anchor is not collector.anchor:
                    again.add((collector.anchor, column.anchor))
    return again


def _alone(column: Column, columns: Columns, collectors: dict[Node, Collector]) -> None:
    rows = column.rows_shape
    placed = columns.place(column, product(rows))
    if len(rows) > 1 and isinstance(placed, Placed) and placed.is_plain:  # a cut axis can be lanes, but not rows
        in_lanes = columns.place(column, rows[0])
        if isinstance(in_lanes, Placed) and not in_lanes.is_plain:
            rows, placed = rows[:1], in_lanes
    if isinstance(placed, Reject):
        columns.rejects.append(placed)
        return
    dtype = column.lookup.table.meta["val"].dtype
    output = Output((Piece(placed, 0),), shape_of(column.anchor), rows, placed.width, dtype)
    collectors[column.anchor] = Collector(column.anchor, (output,))


def _column_behind(node: Node, anchor: Node, columns: Columns) -> Column | None:
    """The column that `node` is, or is a reshape of, where the collector at `anchor` may write it."""
    while node not in columns.found and node.target in REORDER_NOTHING and not columns.aliases.edited(node):
        node = node.args[0]  # type: ignore[assignment]
    column = columns.found.get(node)
    if column is None or columns.aliases.edited(column.anchor) or (anchor, column.anchor) in columns.copied:
        return None
    return column


def _cat(node: Node, columns: Columns) -> Collector | None:
    stacked = node.target is aten.stack.default
    if not stacked and node.target is not aten.cat.default:
        return None
    inputs = node.args[0]
    if not isinstance(inputs, list | tuple) or not all(isinstance(item, Node) for item in inputs):
        return None
    dim = joined_dim(node)
    if dim == 0:
        return None
    rows, last = shape_of(node)[:dim], len(shape_of(node)) - 1
    found: list[tuple[Any, Item]] = []
    for item in inputs:
        written = _written_out(item, rows, node, columns) if dim == last else None
        found += written or [(item, _item(item, rows, 1 if stacked else None, node, columns))]  # type: ignore[arg-type]
    inputs, items = [item for item, _ in found], [placed for _, placed in found]
    if not any(isinstance(placed, Placed) for placed, _ in items):
        return None
    if stacked and not all(placed for placed, _ in items):
        return None
    return _collector(node, dim, list(inputs), items, stacked)  # type: ignore[arg-type]


Item = tuple["Placed | Layout | None", int]  # what to write, and its extent along the collector's dim


def _item(item: Node, rows: tuple[Size, ...], stacked: int | None, node: Node, columns: Columns) -> Item:
    """How one input of a cat is written into it: as a column, as a copy, or (None) not at all."""
    nothing: Item = (None, 0)
    shape = shape_of(item)
    extent = stacked or static(shape[len(rows)])
    width = static(product(shape[len(rows) :]))
    if extent is None or width is None or item.meta["val"].dtype != node.meta["val"].dtype:
        return nothing
    if not all(map(same, shape[: len(rows)], rows)):
        return nothing
    column = _column_behind(item, node, columns)
    if column is not None:
        placed = columns.place(column, product(rows))
        if isinstance(placed, Placed) and placed.width == width:
            return placed, extent
        if isinstance(placed, Reject):
            columns.rejects.append(placed)
        return nothing
    if tensor_of(item) is None or item.meta["val"].device != node.meta["val"].device:
        return nothing
    return columns.place_copy(item, len(rows)), extent


def _written_out(item: Any, rows: tuple[Size, ...], node: Node, columns: Columns) -> list[tuple[Any, Item]] | None:
    """The inputs of a cat of columns, in place of this cat, or of a view of it, that nobody else reads.

    One row of the cat is the rows of its inputs, one behind the other. None where it is no such cat.
    """
    while item.target in REORDER_NOTHING and len(item.users) == 1 and not columns.aliases.edited(item):
        item = item.args[0]
    if item.target is not aten.cat.default or len(item.users) > 1 or columns.aliases.edited(item):
        return None
    shape, ahead = shape_of(item), len(rows)
    inputs, dim = item.args[0], joined_dim(item)
    in_order = dim >= ahead and all(static(size) == 1 for size in shape[ahead:dim])
    if not in_order or not all(map(same, shape[:ahead], rows)):
        return None
    widths = [static(product(shape_of(each)[ahead:])) for each in inputs]
    found = [_item(each, rows, width, node, columns) for each, width in zip(inputs, widths, strict=True)]
    placed = [place for place, _ in found]
    fits = all(widths) and None not in placed and any(isinstance(place, Placed) for place in placed)
    return list(zip(inputs, found, strict=True)) if fits else None


def _collector(node: Node, dim: int, inputs: list[Node], items: list[Item], stacked: bool) -> Collector | None:
    """Runs of inputs that fit become outputs; the others stay inputs of a shorter cat."""
    shape, parts, run = shape_of(node), list[Output | Node](), list[tuple[Node, Item]]()
    inner = static(product(shape[dim + 1 :]))
    if inner is None:
        return None

    def close_run() -> None:
        if any(isinstance(placed, Placed) for _, (placed, _) in run):
            parts.append(_output(node, dim, inner, [item for _, item in run]))
        else:
            parts.extend(source for source, _ in run)
        run.clear()

    for source, item in zip(inputs, items, strict=True):
        if item[0] is None:
            close_run()
            parts.append(source)
        else:
            run.append((source, item))
    close_run()
    return Collector(node, tuple(parts), dim) if any(isinstance(part, Output) for part in parts) else None


def _output(node: Node, dim: int, inner: int, items: list[Item]) -> Output:
    pieces, offset = [], 0
    for placed, extent in items:
        assert placed is not None
        pieces.append(Piece(placed, offset * inner))
        offset += extent
    shape = shape_of(node)
    rows = shape[:dim]
    return Output(tuple(pieces), (*rows, offset, *shape[dim + 1 :]), rows, offset * inner, node.meta["val"].dtype)


def _sum(node: Node, columns: Columns) -> Collector | None:
    """((a + b) + c) + ...: the wide part's columns, added in the order in which torch adds them."""
    terms = list(_terms(node))
    found = [_column_behind(term, node, columns) for term in terms]
    if len(terms) < 2 or any(column is None for column in found):
        return None
    if not all(_addable(term, node) for term in terms):
        return None
    rows = shape_of(node)[:-1]
    placed = [columns.place(column, product(rows)) for column in found if column is not None]
    width = static(shape_of(node)[-1])
    if any(isinstance(place, Reject) or place.width != width for place in placed):
        return None
    pieces = tuple(Piece(place, 0, add=index > 0) for index, place in enumerate(placed))  # type: ignore[arg-type]
    return Collector(node, (Output(pieces, shape_of(node), rows, width, node.meta["val"].dtype),))


def _addable(term: Node, node: Node) -> bool:
    return (
        same_shape(term, node)
        and term.meta["val"].dtype == node.meta["val"].dtype
        and node.meta["val"].dtype in (torch.float32, torch.float64)  # halves round after every addition
    )


def _terms(node: Node) -> Iterator[Node]:
    """The terms of a left-deep chain of additions; `0 + a`, as Python's sum() starts, is a."""
    chain = []
    while node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        left, right = node.args
        if not isinstance(left, Node):
            break
        if right == 0 and not isinstance(right, Node):
            node = left
            continue
        if not is_tensor(right):
            break
        chain.append(right)
        node = left
    if chain:
        yield node
        yield from reversed(chain)
