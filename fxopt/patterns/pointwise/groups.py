"""Groups: operators that one call can compute, grown from a seed along reads and users as long as nothing outside lies
between two of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fxopt.kernels.pointwise.plan import MOST_AXES, Input, Output, Plan
from fxopt.patterns.pointwise.axes import Axes, Dims, Mismatch, behind, expanded
from fxopt.patterns.pointwise.operators import rule_of
from fxopt.patterns.pointwise.program import Program
from fxopt.patterns.pointwise.rule import Call, Rule, tensors
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.sizes import expression, shape_of, tensor_of
from fxopt.shape.strides import Strides

_MOST_MEMBERS = 120  # a plan's values share 32 KB


class Unfit(Exception):
    """Why a group is left alone."""


@dataclass
class Group:
    """Members with the dims of their results, and what they read: (member, position) -> (tensor, its dims, the dims
    as the member sees them).
    """

    axes: Axes = field(default_factory=Axes)
    dims: dict[Node, Dims] = field(default_factory=dict)
    reads: dict[tuple[Node, int], tuple[Node, Dims, Dims]] = field(default_factory=dict)

    def with_member(self, node: Node, rule: Rule) -> Group:
        """This group and one more. Raises Mismatch where their axes do not agree."""
        new = Group(self.axes.copy(), dict(self.dims), dict(self.reads))
        seen: dict[int, Dims] = {}
        for position, argument in tensors(node).items():
            base, order = behind(argument)
            dims = new.dims[base] if base in new.dims else new.axes.of(shape_of(base))
            seen[position] = tuple(None if dim is None else dims[dim] for dim in order)
            if not rule.broadcasts and expanded(argument, seen[position]):
                raise Mismatch
            new.reads[node, position] = base, dims, seen[position]
        new.dims[node] = rule.shape(node, new.axes, seen)
        for base, dims, _ in new.reads.values():
            if base is node:
                for axis, other in zip(dims, new.dims[node], strict=True):
                    new.axes.join(axis, other)
        for dims in (*new.dims.values(), *(read[1] for read in new.reads.values())):
            roots = [axis for axis in new.axes.roots(dims) if axis is not None]
            if len(set(roots)) < len(roots):
                raise Mismatch  # a tensor against its own transpose
        return new


@dataclass(frozen=True)
class Fused:
    """A group as one call: tensors in the order of the plan's inputs, nodes in that of its outputs."""

    plan: Plan
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    members: tuple[Node, ...]


class Search:
    """All groups of one graph."""

    def __init__(self, graph: Graph, without: set[Node]) -> None:
        self.graph, self.without = graph, without
        self.aliases = Aliases(graph)
        self.strides = Strides(graph)
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.rules = {node: rule for node in graph.nodes if (rule := self._rule(node)) is not None}
        self.readers: dict[Node, list[Node]] = {}
        for node in self.rules:
            for base in self._bases(node):
                self.readers.setdefault(base, []).append(node)
        self.before: dict[Node, int] = {}
        self.after: dict[Node, int] = {}
        self.taken: dict[Node, int] = {}  # member -> the mask of its group
        self._relate()

    def groups(self, fewest: int) -> Iterator[Fused | tuple[Node, str]]:
        for seed in self.rules:
            if seed in self.taken:
                continue
            group = self._grown(seed)
            if len(group.dims) < fewest:
                continue
            try:
                fused = self._fused(group)
            except (Unfit, Mismatch) as error:
                yield seed, str(error) or "its dims do not run along the same axes"
                continue
            if len(fused.members) >= fewest:
                mask = sum(1 << self.order[node] for node in fused.members)
                self.taken |= dict.fromkeys(fused.members, mask)
                self._relate()
                yield fused

    def _rule(self, node: Node) -> Rule | None:
        if node.op != "call_function" or node in self.without or not is_pure(node) or self.aliases.edited(node):
            return None
        rule = rule_of(node)
        return rule if rule and not any(map(self.aliases.edited, node.all_input_nodes)) else None

    def _bases(self, node: Node) -> list[Node]:
        return [behind(argument)[0] for argument in tensors(node).values()]

    def _inputs(self, node: Node) -> list[Node]:
        return self._bases(node) if node in self.rules else node.all_input_nodes

    def _relate(self) -> None:
        """Masks of all nodes before and after each, where a group that was taken is one node."""
        for related, nodes, following in (
            (self.before, list(self.graph.nodes), False),
            (self.after, list(reversed(self.graph.nodes)), True),
        ):
            related.clear()
            masks = dict.fromkeys(nodes, 0)
            for _ in range(2 if self.taken else 1):  # a group relates its first members to what its last ones read
                for node in nodes:
                    if following:
                        for source in self._inputs(node):
                            masks[source] |= masks[node] | 1 << self.order[node]
                    else:
                        for source in self._inputs(node):
                            masks[node] |= masks[source] | 1 << self.order[source]
                groups: dict[int, int] = {}
                for node, mask in self.taken.items():
                    groups[mask] = groups.get(mask, 0) | masks[node]
                for node, mask in self.taken.items():
                    masks[node] |= groups[mask] & ~mask
            related.update(masks)

    def _grown(self, seed: Node) -> Group:
        group = Group()
        try:
            group = group.with_member(seed, self.rules[seed])
        except Mismatch:
            return group
        refused: set[Node] = set()
        queue = [seed]
        while queue:
            node = queue.pop(0)
            for near in sorted({*self._bases(node), *self.readers.get(node, ())}, key=self.order.__getitem__):
                if near not in self.rules or near in group.dims or near in self.taken or near in refused:
                    continue
                grown = self._with(group, near)
                if grown is None:
                    refused.add(near)
                    continue
                group, refused = grown, set()
                queue += [node, near]
                break
        return group

    def _with(self, group: Group, node: Node) -> Group | None:
        if len(group.dims) >= _MOST_MEMBERS or not self._is_convex([*group.dims, node]):
            return None
        try:
            grown = group.with_member(node, self.rules[node])
            self._fused(grown)
        except (Mismatch, Unfit):
            return None
        return grown

    def _is_convex(self, members: list[Node]) -> bool:
        before = after = own = 0
        for member in members:
            before |= self.before[member]
            after |= self.after[member]
            own |= 1 << self.order[member]
        return not before & after & ~own

    def _fused(self, group: Group) -> Fused:
        """Raises Unfit where no plan computes this group."""
        members = sorted(group.dims, key=self.order.__getitem__)
        alive = [node for node in members if self._is_read_outside(node, group.dims)]
        row = group.axes.roots(group.dims[alive[-1]])[:1] if alive else ()
        if not row or row[0] is None:
            raise Unfit("its result has no rows")
        if any(_depend_alike(group.axes, row[0], axis) for dims in group.dims.values() for axis in dims):
            raise Unfit("it computes pairs of rows")
        constant = self._constants(group, members, alive, row[0])
        members = [node for node in members if node not in constant]
        outputs = [node for node in alive if node not in constant]
        reads = {key: read for key, read in group.reads.items() if key[0] not in constant}
        number = _numbered(group, members, outputs, row[0], reads)
        return self._written(group, members, outputs, reads, number)

    def _constants(self, group: Group, members: list[Node], alive: list[Node], row: int) -> set[Node]:
        """Members that others need and that are the same for all rows, and what they are made of: left as they are."""
        left = {node for node in alive if row not in group.axes.roots(group.dims[node])}
        for node in reversed(members):
            if any(reader in left for reader in self.readers.get(node, ())):
                left.add(node)
        return left

    def _is_read_outside(self, node: Node, members: dict[Node, Dims]) -> bool:
        for user in node.users:
            if user in members:
                continue
            if user in self.rules or not user.users or tensor_of(user) is None or behind_one(user) is not node:
                return True
            if self._is_read_outside(user, members):
                return True
        return False

    def _written(
        self,
        group: Group,
        members: list[Node],
        outputs: list[Node],
        reads: dict[tuple[Node, int], tuple[Node, Dims, Dims]],
        number: dict[int, int],
    ) -> Fused:
        def numbered(dims: Dims) -> Dims:
            return tuple(None if axis is None else number[axis] for axis in group.axes.roots(dims))

        inside = set(members)
        tensors_read = list(
            dict.fromkeys((base, numbered(dims)) for base, dims, _ in reads.values() if base not in inside)
        )
        place = {read: position for position, read in enumerate(tensors_read)}
        program = Program(len(number), tuple(Input(dims) for _, dims in tensors_read))
        values: dict[Node, int] = {}
        for node in members:
            own = {position: read for (member, position), read in reads.items() if member is node}
            arguments = {
                position: values[base] if base in inside else place[base, numbered(dims)]
                for position, (base, dims, _) in own.items()
            }
            seen = {position: numbered(read[2]) for position, read in own.items()}
            values[node] = self.rules[node].steps(Call(node, program, arguments, seen, numbered(group.dims[node])))
        results: list[Output] = []
        for node in outputs:
            dims = numbered(group.dims[node])
            value = values[node]
            axes = frozenset(axis for axis in dims if axis is not None)
            if program.axes_of(value) != axes or value < len(tensors_read) or value in [r.value for r in results]:
                value = program.elementwise("copy", program.spread(value, axes))
            results.append(Output(value, dims, node.meta["val"].dtype.is_floating_point is False))
        plan = program.plan(tuple(results))
        if plan.outer == 0:
            raise Unfit("it reduces over its rows")
        return Fused(plan, tuple(base for base, _ in tensors_read), tuple(outputs), tuple(members))


def _depend_alike(axes: Axes, row: int, axis: int | None) -> bool:
    """Whether another axis grows with the number of rows: the rows of the result would not be rows of what is read."""
    if axis is None or axes.root(axis) == row:
        return False
    symbols = (expression(axes.size(each)).free_symbols for each in (row, axis))
    return bool(set.intersection(*map(set, symbols)))


def behind_one(node: Node) -> Node | None:
    base, _ = behind(node)
    return None if base is node else node.args[0]  # type: ignore[return-value]


def _numbered(
    group: Group,
    members: list[Node],
    outputs: list[Node],
    row: int,
    reads: dict[tuple[Node, int], tuple[Node, Dims, Dims]],
) -> dict[int, int]:
    """Axes by number: rows first, every output's dims in order, then as the tensors that are read have them."""
    after: dict[int, set[int]] = {}

    def reaches(start: int, end: int) -> bool:
        return start == end or any(reaches(axis, end) for axis in after.get(start, ()))

    def follow(dims: Dims, must: bool) -> None:
        found = [axis for axis in group.axes.roots(dims) if axis is not None]
        for axis in found:
            after.setdefault(axis, set())
        for left, right in itertools.pairwise(found):
            if not reaches(right, left):
                after[left].add(right)
            elif must:
                raise Unfit("its results have their dims in different orders")

    for node in outputs:
        if row not in group.axes.roots(group.dims[node]):
            raise Unfit("its results do not have the same rows")
        follow(group.dims[node], must=True)
    wide = sorted(
        [*(group.dims[node] for node in members), *(dims for _, dims, _ in reads.values())], key=len, reverse=True
    )
    for dims in wide:
        follow(dims, must=False)
    if any(reaches(axis, row) for axis in after if axis != row):
        raise Unfit("its rows are not the outermost axis")
    order: list[int] = []

    def visit(axis: int) -> None:
        if axis not in order:
            for later in sorted(after[axis], reverse=True):
                visit(later)
            order.append(axis)

    for axis in sorted((axis for axis in after if axis != row), reverse=True):
        visit(axis)
    visit(row)
    if len(order) > MOST_AXES:
        raise Unfit(f"it has {len(order)} axes")
    return {axis: position for position, axis in enumerate(reversed(order))}
