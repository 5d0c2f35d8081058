"""Pieces of a tensor: neighbours that are one slice together, and reads that fall on the seams of a cat."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.shape.sizes import Size, same, same_sizes, shape_of, static
from fxopt.shape.view_operators import SPLITS, split_dim, through
from fxopt.shape.view_steps import Select, Slice
from fxopt.shape.views import Axis, Part, View

aten = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """Inputs of a cat that follow each other: together a view of `base`."""

    base: Node
    view: View
    inputs: tuple[Node, ...]

    @property
    def is_merged(self) -> bool:
        return len(self.inputs) > 1

    @property
    def source(self) -> Node:
        """What to start from: a single input stays what it is."""
        return self.base if self.is_merged else self.inputs[0]


def merged(runs: Iterable[Run], dim: int) -> Iterator[Run]:
    """The runs, those that are neighbours along axis `dim` made one."""
    last: list[Run] = []  # neighbours so far; their view is worked out once they end
    view: View | None = None
    for run in runs:
        longer = _neighbours(view, run.view, dim, run.base) if view is not None and last[0].base is run.base else None
        if longer is not None:
            last.append(run)
            view = longer
            continue
        if view is not None:
            yield Run(last[0].base, view, tuple(item for one in last for item in one.inputs))
        last, view = [run], run.view
    if view is not None:
        yield Run(last[0].base, view, tuple(item for one in last for item in one.inputs))


def _neighbours(left: View, right: View, dim: int, base: Node) -> View | None:
    """Both views together, where `right` begins along axis `dim` at the element where `left` ends."""
    if not left.axes[dim].parts and not right.axes[dim].parts:
        differing = set(left.fixed) ^ set(right.fixed)
        dims = {number for number, _ in differing}
        if len(differing) != 2 or len(dims) != 1:
            return None
        left = _lifted(left, dim, dims.pop(), base)
    if not right.axes[dim].parts and left.axes[dim].parts:
        right = _lifted(right, dim, left.axes[dim].parts[0].dim, base)
    if len(left.axes[dim].parts) != 1 or len(right.axes[dim].parts) != 1:
        return None
    first, second = left.axes[dim].parts[0], right.axes[dim].parts[0]
    size, more = static(first.size), static(second.size)
    if first.dim != second.dim or size is None or (more is None and not second.whole):
        return None
    if second.start != first.start + size or left.is_expanded or right.is_expanded:
        return None
    if _others(left, dim) != _others(right, dim) or set(left.fixed) != set(right.fixed):
        return None
    both = Part(first.dim, first.start, first.size + second.size, second.whole)
    return View((*left.axes[:dim], Axis((both,)), *left.axes[dim + 1 :]), left.fixed)


def _others(view: View, dim: int) -> tuple[Axis, ...]:
    return view.axes[:dim] + view.axes[dim + 1 :]


def _lifted(view: View, dim: int, number: int, base: Node) -> View:
    """A new axis at `dim` as a slice of size 1 of base dim `number`, of which the view has taken one element."""
    for place, index in view.fixed:
        if place == number:
            part = Part(number, index, 1, whole=static(shape_of(base)[number]) == index + 1)
            fixed = tuple(entry for entry in view.fixed if entry[0] != number)
            return View((*view.axes[:dim], Axis((part,)), *view.axes[dim + 1 :]), fixed)
    return view


def whole_split(inputs: Sequence[Node], start: int, dim: int) -> int:
    """How many inputs from `start` on are all the pieces of one split along `dim`, in order; 0 where they are not."""
    first = inputs[start]
    if first.target is not operator.getitem or first.args[1] != 0:
        return 0
    many: Node = first.args[0]  # type: ignore[assignment]
    if many.target not in SPLITS or split_dim(many) != dim:
        return 0
    count = len(many.meta["val"])
    pieces = inputs[start : start + count]
    in_order = all(
        piece.target is operator.getitem and piece.args == (many, index) for index, piece in enumerate(pieces)
    )
    return count if len(pieces) == count and in_order else 0


def pieces_of(node: Node, dim: int, sizes: Sequence[Size] | None) -> dict[Node, int]:
    """Input by what reads it, of a cat of these sizes (None: a stack); {} if something reads otherwise."""
    found: dict[Node, int] = {}
    starts = None if sizes is None else _starts(sizes)
    for user in node.users:
        if user.target is aten.unbind.int or user.target in SPLITS:
            if not _cuts_alike(user, dim, sizes):
                return {}
            found |= {piece: piece.args[1] for piece in user.users}  # type: ignore[misc]
            continue
        index = _index_of(user, node, dim, sizes, starts)
        if index is None:
            return {}
        found[user] = index
    return found


def _cuts_alike(many: Node, dim: int, sizes: Sequence[Size] | None) -> bool:
    if many.target is aten.unbind.int:
        own = many.args[1] if len(many.args) > 1 else 0
        rank = len(shape_of(many.args[0]))  # type: ignore[arg-type]
        return sizes is None and int(own) % rank == dim  # type: ignore[arg-type]
    if sizes is None or split_dim(many) != dim:
        return False
    cut = [piece.shape[dim] for piece in many.meta["val"]]
    return same_sizes(cut, sizes)


def _starts(sizes: Sequence[Size]) -> dict[int, int]:
    """Where each input that is not empty begins, as far as that is the same for every model input."""
    starts: dict[int, int] = {}
    start = 0
    for index, size in enumerate(sizes):
        if static(size) != 0:
            starts.setdefault(start, index)
        known = static(size)
        if known is None:
            break
        start += known
    return starts


def _index_of(
    user: Node, node: Node, dim: int, sizes: Sequence[Size] | None, starts: dict[int, int] | None
) -> int | None:
    """The input that a slice or a select of the cat reads, if it is exactly one."""
    source, step = through(user) or (None, None)
    if source is not node:
        return None
    match step:
        case Select(at, index) if sizes is None and at == dim:
            return index
        case Slice(at, start, size) if sizes is not None and starts is not None and at == dim:
            number = starts.get(start)
            return number if number is not None and same(size, sizes[number]) else None
    return None
