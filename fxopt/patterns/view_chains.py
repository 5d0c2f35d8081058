"""Chains of view operators that fewer of them, or none at all, would make."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.normalize.gradients import BARRIER
from fxopt.patterns.core import Match, Reject, Search
from fxopt.shape.aliases import is_handed_out
from fxopt.shape.fewest_steps import steps_of
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of
from fxopt.shape.strides import MAY_COPY, Layout, looks_contiguous, reads_once
from fxopt.shape.view_operators import COPIES, REGROUPS, SAME, through
from fxopt.shape.view_steps import Contiguous, Reshape, Step
from fxopt.shape.views import View

aten = torch.ops.aten
_REORDER_NOTHING = REGROUPS | SAME | {aten.detach.default}


@dataclass(frozen=True)
class Seen:
    """A node as a view of `base`. root: the farthest tensor that it is a mere reshape of. copies: how many operators
    on the way here may have copied."""

    base: Node
    view: View
    root: Node
    copies: int = 0

    @classmethod
    def of(cls, node: Node, root: Node | None = None, copies: int = 0) -> Seen:
        return cls(node, View.of(shape_of(node)), root or node, copies)


class ViewChains:
    """Every tensor of a graph as a view of another one."""

    def __init__(self, search: Search) -> None:
        self.aliases, self.strides = search.aliases, search.strides
        self._inference = search.inference
        self._opaque = bool(search.graph.find_nodes(op="call_module"))
        self._seen: dict[Node, Seen] = {}
        self._sources: dict[Node, Node] = {}
        for node in search.graph.nodes:
            self._add(node)

    def of(self, node: Node) -> Seen:
        return self._seen.get(node) or Seen.of(node)

    def matches(self) -> Iterator[Match]:
        """The last node of a chain first: what it frees is no match of its own."""
        freed: set[Node] = set()
        for node in reversed(self._sources):
            if node in freed or self._keeps_its_kind(node):
                continue
            found = self._best(node)
            if found is not None:
                freed.update(found.bound["freed"])
                yield found

    def _keeps_its_kind(self, node: Node) -> bool:
        """One of several views that are made at once, or a view of one: with gradients torch refuses to edit it."""
        if self._inference or not self.aliases.leaves(node):
            return False
        while node in self._sources and node.target is not operator.getitem:
            node = self._sources[node]
        return node in self._sources

    def _best(self, node: Node) -> Match | None:
        """The way that saves the most operators, if one does."""
        best, most = None, 0
        for source, steps in self._ways(node):
            dead = self.freed(node, source)
            if self._copies(node, source) and not self._may_become(node, source, steps):
                steps = [*steps, Contiguous()]
            if len(dead) - len(steps) > most and self._may_become(node, source, steps):
                best = self._match(node, source, steps, dead)
                most = len(dead) - len(steps)
        return best

    def _match(self, node: Node, source: Node, steps: list[Step], dead: list[Node]) -> Match:
        """exact: even the strides of axes of size 1 count, as they do where operators look for channels last."""
        exact = self.strides.asked(node) is Layout.CONTIGUOUS and len(shape_of(node)) > 3
        bound = {"source": source, "steps": steps, "freed": tuple(reversed(dead)), "exact": exact}
        return Match(node, bound)

    def _ways(self, node: Node) -> Iterator[tuple[Node, list[Step]]]:
        """(tensor, operators) that give `node`, other than `node` itself."""
        seen = self.of(node)
        if seen.root is not node:
            yield seen.root, [] if same_shape(seen.root, node) else [Reshape(shape_of(node))]
        if seen.base is self._sources[node]:
            if seen.view.is_base:
                yield seen.base, []
        elif seen.base is not node:
            steps = steps_of(seen.view, shape_of(seen.base))
            if steps is not None:
                yield seen.base, steps

    def freed(self, node: Node, source: Node) -> list[Node]:
        """The operators between `source` and `node` that nothing else needs, `node` first."""
        dead: list[Node] = []
        while True:
            via = node
            if node.target is operator.getitem:
                via = node.args[0]  # type: ignore[assignment]
                if len(via.users) > 1:
                    return dead
            dead.append(via)
            before = self._sources[node]
            if before is source or len(before.users) > 1:
                return dead
            node = before

    def _add(self, node: Node) -> None:
        if node.op != "call_function" or node.meta.get("val") is None or self.aliases.edited(node):
            return
        viewed = self._through(node)
        if viewed is None or not isinstance(node.meta["val"], torch.Tensor):
            return
        source, step = viewed
        before = self.of(source)
        copies = before.copies + self._may_copy(node, source)
        base, view = before.base, before.view.after(step)
        if view is None:
            base, view = source, View.of(shape_of(source)).after(step)
        in_order = node.target in _REORDER_NOTHING
        if view is None:
            seen = Seen.of(node, before.root if in_order else None, copies)
        elif in_order:
            seen = Seen(base, view, before.root, copies)
        else:
            root = self.of(base).root if view.is_reshape(shape_of(base)) else node
            seen = Seen(base, view, root, copies)
        self._seen[node], self._sources[node] = seen, source

    def _through(self, node: Node) -> tuple[Node, Step | None] | None:
        if node.target is aten.detach.default and self._inference and not self.aliases.leaves(node):
            return node.all_input_nodes[0], Contiguous()
        return through(node, (aten.expand.default,))

    def _is_known(self, source: Node, node: Node) -> bool:
        """Whether the caller has `source`, or may get it for another view: each one is a tensor object of its own."""
        others = (other for other in self.aliases.sharing(source) if other is not node and tensor_of(other) is not None)
        return any(other.op != "call_function" or _is_handed_out(other) for other in others)

    def _may_copy(self, node: Node, source: Node) -> bool:
        if node.target in COPIES:
            return True
        return node.target in MAY_COPY and self.strides.known(source) is not Layout.CONTIGUOUS

    def _copies(self, node: Node, source: Node) -> bool:
        """Whether an operator between the two may have copied."""
        return self.of(node).copies != self.of(source).copies

    def _may_become(self, node: Node, source: Node, steps: list[Step]) -> bool:
        """Whether nothing but the time that it takes tells the shorter way from the longer one."""
        if self.aliases.edited(source):
            return False
        if not steps and _is_handed_out(node) and self._is_known(source, node):
            return False
        if not self._copies(node, source):
            return True
        if self.aliases.leaves(node) or (self._opaque and self.aliases.leaves(source)):
            return False
        if steps and isinstance(steps[-1], Contiguous):
            return self.strides.known(node) is Layout.CONTIGUOUS
        moved = any(not isinstance(step, Reshape) for step in steps)
        known = Layout.ANY if moved else self.strides.known(source)
        if self.strides.asked(node) > min(self.strides.known(node), known):
            return False
        copies_itself = bool(steps) and not moved and not _is_spread(source)
        return copies_itself or (not moved and looks_contiguous(source)) or all(map(reads_once, node.users))


def _is_spread(node: Node) -> bool:
    """Whether one element stands for several. A reshape of it may be a view, where eager had a copy: a product of
    matrices whose rows are one row takes torch ten times as long."""
    value = tensor_of(node)
    sizes_and_strides = zip(value.shape, value.stride(), strict=True) if value is not None else ()
    return any(static(stride) == 0 and static(size) != 1 for size, stride in sizes_and_strides)


def _is_handed_out(node: Node) -> bool:
    return is_handed_out(node, BARRIER)


def find_views(search: Search) -> Iterator[Match | Reject]:
    """Chains that become shorter, in graphs whose gradients are not switched on their way."""
    if search.changes_modes:
        return
    yield from ViewChains(search).matches()
