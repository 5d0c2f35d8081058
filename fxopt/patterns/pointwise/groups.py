"""Groups: operators that one call can compute, grown from a seed along reads and users as long as nothing outside lies
between two of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from torch.fx import Graph, Node

from fxopt.kernels.pointwise.plan import REDUCTIONS, Plan
from fxopt.patterns.pointwise.axes import Axes, Constant, Dims, Mismatch, behind
from fxopt.patterns.pointwise.fused import Fused, Group, Unfit, fused
from fxopt.patterns.pointwise.operators import is_exact, rule_of
from fxopt.patterns.pointwise.rule import Rule, tensors
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.deciding import Deciding
from fxopt.shape.sizes import depend_alike, tensor_of
from fxopt.shape.standing import analysed
from fxopt.shape.strides import Strides

_MOST_MEMBERS = 120  # a plan's values share 32 KB


class Grouping:
    """All groups of one graph on one kind of device."""

    def __init__(self, graph: Graph, without: set[Node], device: str) -> None:
        self.graph, self.without, self.device = graph, without, device
        self.aliases = analysed(graph, Aliases)
        self.strides = analysed(graph, Strides)
        self.deciding = analysed(graph, Deciding)
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.rules = {node: rule for node in graph.nodes if (rule := self._rule(node)) is not None}
        self.sources = {node: self._sources(node) for node in graph.nodes}
        self.readers: dict[Node, list[Node]] = {}
        for node in self.rules:
            for source in self.sources[node]:
                self.readers.setdefault(source, []).append(node)
        self.before: dict[Node, int] = {}
        self.after: dict[Node, int] = {}
        self.taken: dict[Node, int] = {}  # member -> the mask of its group
        self._relate()

    def groups(self, fewest: int, alone: Collection[Any] = ()) -> Iterator[Fused | tuple[Node, str]]:
        """Of at least so many operators; then, where none of these has them, those that are worth a call `alone`."""
        single: list[Fused] = []
        for seed in self.rules:
            if seed in self.taken:
                continue
            group = self._grown(seed)
            if len(group.dims) < fewest and seed.target not in alone:
                continue
            try:
                found = self._fused(group)
            except (Unfit, Mismatch) as error:
                yield seed, str(error) or "its dims do not run along the same axes"
                continue
            if len(found.members) >= fewest:
                mask = sum(1 << self.order[node] for node in found.members)
                self.taken |= dict.fromkeys(found.members, mask)
                self._relate()
                yield found
            elif len(found.members) == 1 and found.members[0].target in alone:
                single.append(found)
        yield from (found for found in single if found.members[0] not in self.taken)

    def _rule(self, node: Node) -> Rule | None:
        if node.op != "call_function" or node in self.without or not is_pure(node) or self.aliases.edited(node):
            return None
        if node in self.deciding and not is_exact(node):
            return None
        rule = rule_of(node, self.device)
        if rule is None or any(map(self.aliases.edited, (*node.all_input_nodes, *_bases(node)))):
            return None
        return rule

    def _sources(self, node: Node) -> list[Node]:
        """What a node reads; an operator of a chain past the views of it."""
        return _bases(node) if node in self.rules else node.all_input_nodes

    def _relate(self) -> None:
        """Masks of all nodes before and after each, where a group that was taken is one node."""
        for related, nodes, following in (
            (self.before, list(self.sources), False),
            (self.after, list(reversed(self.sources)), True),
        ):
            related.clear()
            masks = dict.fromkeys(nodes, 0)
            for _ in range(2 if self.taken else 1):  # a group relates its first members to what its last ones read
                for node in nodes:
                    for source in self.sources[node]:
                        if following:
                            masks[source] |= masks[node] | 1 << self.order[node]
                        else:
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
            for near in sorted({*self.sources[node], *self.readers.get(node, ())}, key=self.order.__getitem__):
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
            grown = self._joined(group, node)
            self._fused(grown)
        except (Mismatch, Unfit):
            return None
        return grown

    def _joined(self, group: Group, node: Node) -> Group:
        """The group and one more; put together anew where its members took a dim of it for one with an axis."""
        try:
            return group.with_member(node, self.rules[node])
        except Constant:
            members, group = sorted([*group.dims, node], key=self.order.__getitem__), Group()
            for member in members:
                group = group.with_member(member, self.rules[member])
            return group

    def _is_convex(self, members: list[Node]) -> bool:
        before = after = own = 0
        for member in members:
            before |= self.before[member]
            after |= self.after[member]
            own |= 1 << self.order[member]
        return not before & after & ~own

    def _fused(self, group: Group) -> Fused:
        """Raises Unfit where no plan computes this group."""
        joined = group.with_one_read()
        try:
            found = self._planned(joined)
        except (Mismatch, Unfit):
            if joined is group:
                raise
            found = self._planned(group)
        if self.device == "cuda" and _are_apart(found.plan):
            raise Unfit("it has sums, and results of which neither has all axes of the other")
        return found

    def _planned(self, group: Group) -> Fused:
        """Raises Unfit as :meth:`_fused`."""
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
        return fused(group, members, outputs, row[0], self.rules)

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


def _bases(node: Node) -> list[Node]:
    """What an operator of a chain reads, past views and copies of it."""
    return [behind(argument)[0] for argument in tensors(node).values()]


def _are_apart(plan: Plan) -> bool:
    """Whether there are sums, and results of which neither has all axes of the other.

    HSTU's mask of scores beside a layer norm took 81 us on an H200. Apart they take 34 and 18: lanes share the rows of
    the norm (kernels/pointwise/cuda/held.py).
    """
    results = [plan.axes_of(output.value) for output in plan.outputs]
    sums = any(step.op in REDUCTIONS for step in plan.steps)
    return sums and any(not (one <= other or other <= one) for one, other in itertools.combinations(results, 2))


def _depend_alike(axes: Axes, row: int, axis: int | None) -> bool:
    """Whether another axis grows with the number of rows: the rows of the result would not be rows of what is read."""
    if axis is None or axes.root(axis) == row:
        return False
    return depend_alike(axes.size(row), axes.size(axis))


def behind_one(node: Node) -> Node | None:
    base, _ = behind(node)
    return None if base is node else node.args[0]  # type: ignore[return-value]
