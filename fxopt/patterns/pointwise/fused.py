"""A group of operators as one call: its plan, what it reads and what it gives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from fxopt.kernels.pointwise.plan import MOST_AXES, Input, Output, Plan
from fxopt.patterns.pointwise.axes import Axes, Constant, Dims, Mismatch, behind, expanded
from fxopt.patterns.pointwise.program import Program
from fxopt.patterns.pointwise.rule import Call, Rule, tensors
from fxopt.shape.sizes import shape_of

Reads = dict[tuple[Node, int], tuple[Node, Dims, Dims]]


class Unfit(Exception):
    """Why a group is left alone."""


@dataclass
class Group:
    """Members with the dims of their results, and what they read: (member, position) -> (tensor, its dims, the dims
    as the member sees them).
    """

    axes: Axes = field(default_factory=Axes)
    dims: dict[Node, Dims] = field(default_factory=dict)
    reads: Reads = field(default_factory=dict)

    def with_member(self, node: Node, rule: Rule) -> Group:
        """This group and one more.

        Raises:
            Mismatch: their axes do not agree; Constant: they do where members come in the order of the graph.
        """
        new = Group(self.axes.copy(), dict(self.dims), dict(self.reads))
        seen: dict[int, Dims] = {}
        for position, argument in tensors(node).items():
            base, order = behind(argument)
            dims = new.dims[base] if base in new.dims else new.axes.of(shape_of(base))
            seen[position] = tuple(None if dim is None else dims[dim] for dim in order)
            if not rule.takes_constant(node, expanded(argument, seen[position])):
                raise Mismatch
            new.reads[node, position] = base, dims, seen[position]
        new.dims[node] = rule.shape(node, new.axes, seen)
        for base, dims, _ in new.reads.values():
            if base is node:
                for axis, other in zip(dims, new.dims[node], strict=True):
                    if axis is not None and other is None:
                        raise Constant
                    new.axes.join(axis, other)
        new._check()
        return new

    def with_one_read(self) -> Group:
        """This group, in which all members that read a tensor read it along the same axes: a vector that is divided by
        its own norm is then read once. It is the same object where they do so, or where the axes do not agree.
        """
        first: dict[Node, Dims] = {}
        pairs = [(first.setdefault(base, dims), dims) for base, dims, _ in self.reads.values()]
        if all(self.axes.roots(one) == self.axes.roots(other) for one, other in pairs):
            return self
        new = Group(self.axes.copy(), self.dims, self.reads)
        try:
            for one, other in pairs:
                for axis, same in zip(one, other, strict=True):
                    new.axes.join(axis, same)
            new._check()
        except Mismatch:
            return self
        return new

    def _check(self) -> None:
        for dims in (*self.dims.values(), *(read[1] for read in self.reads.values())):
            roots = [axis for axis in self.axes.roots(dims) if axis is not None]
            if len(set(roots)) < len(roots):
                raise Mismatch  # a tensor against its own transpose


@dataclass(frozen=True)
class Fused:
    """A group as one call: tensors in the order of the plan's inputs, nodes in that of its outputs."""

    plan: Plan
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    members: tuple[Node, ...]


def fused(
    group: Group, members: Sequence[Node], outputs: Sequence[Node], row: int, rules: Mapping[Node, Rule]
) -> Fused:
    """`members` of a group in graph order, of which others read `outputs`. row: the axis of the rows.

    Raises:
        Unfit: no plan computes them.
    """
    inside = set(members)
    reads = {key: read for key, read in group.reads.items() if key[0] in inside}
    number = _numbered(group, members, outputs, row, reads)

    def numbered(dims: Dims) -> Dims:
        return tuple(None if axis is None else number[axis] for axis in group.axes.roots(dims))

    read = list(dict.fromkeys((base, numbered(dims)) for base, dims, _ in reads.values() if base not in inside))
    place = {each: position for position, each in enumerate(read)}
    program = Program(len(number), tuple(Input(dims) for _, dims in read))
    values: dict[Node, int] = {}
    for node in members:
        own = {position: each for (member, position), each in reads.items() if member is node}
        arguments = {
            position: values[base] if base in inside else place[base, numbered(dims)]
            for position, (base, dims, _) in own.items()
        }
        seen = {position: numbered(each[2]) for position, each in own.items()}
        values[node] = rules[node].steps(Call(node, program, arguments, seen, numbered(group.dims[node])))
    results: list[Output] = []
    for node in outputs:
        value, dims = values[node], numbered(group.dims[node])
        axes = frozenset(axis for axis in dims if axis is not None)
        while program.axes_of(value) != axes or value < len(read) or value in [r.value for r in results]:
            value = program.elementwise("copy", program.spread(value, axes))
        results.append(Output(value, dims, node.meta["val"].dtype.is_floating_point is False))
    plan = program.plan(tuple(results))
    if plan.outer == 0:
        raise Unfit("it reduces over its rows")
    return Fused(plan, tuple(base for base, _ in read), tuple(outputs), tuple(members))


def _numbered(group: Group, members: Sequence[Node], outputs: Sequence[Node], row: int, reads: Reads) -> dict[int, int]:
    """Axes by number: rows first, every output's dims in order, then as the tensors that are read have them."""
    order = _Order(group.axes)
    for node in outputs:
        if row not in group.axes.roots(group.dims[node]):
            raise Unfit("its results do not have the same rows")
        if expanded(node, group.dims[node]):
            raise Unfit("a result has an axis that nothing that it reads has")
        if not order.follows(group.dims[node]):
            raise Unfit("its results have their dims in different orders")
    wide = [*(group.dims[node] for node in members), *(dims for _, dims, _ in reads.values())]
    for dims in sorted(wide, key=len, reverse=True):
        order.follows(dims)
    return order.numbers(row)


class _Order:
    """Axes one behind the other, as dims came that have them so; those that came first count."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._after: dict[int, set[int]] = {}

    def follows(self, dims: Dims) -> bool:
        """Takes the order of these dims as far as none before said otherwise. False: one did."""
        found = [axis for axis in self._axes.roots(dims) if axis is not None]
        for axis in found:
            self._after.setdefault(axis, set())
        agrees = True
        for left, right in itertools.pairwise(found):
            if self._reaches(right, left):
                agrees = False
            else:
                self._after[left].add(right)
        return agrees

    def _reaches(self, start: int, end: int) -> bool:
        return start == end or any(self._reaches(axis, end) for axis in self._after.get(start, ()))

    def numbers(self, row: int) -> dict[int, int]:
        """Raises Unfit where `row` cannot be the first, or there are too many axes."""
        others = sorted((axis for axis in self._after if axis != row), reverse=True)
        if any(self._reaches(axis, row) for axis in others):
            raise Unfit("its rows are not the outermost axis")
        last_first: list[int] = []
        for axis in (*others, row):
            self._visit(axis, last_first)
        if len(last_first) > MOST_AXES:
            raise Unfit(f"it has {len(last_first)} axes, expected at most {MOST_AXES}")
        return {axis: position for position, axis in enumerate(reversed(last_first))}

    def _visit(self, axis: int, done: list[int]) -> None:
        if axis not in done:
            for later in sorted(self._after[axis], reverse=True):
                self._visit(later, done)
            done.append(axis)
