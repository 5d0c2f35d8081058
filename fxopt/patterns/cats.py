"""Cats and stacks that put together again what was apart only for a while, or that are taken apart again."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.freshness import Freshness
from fxopt.patterns.pieces import Run, merged, pieces_of, whole_split
from fxopt.patterns.view_chains import ViewChains
from fxopt.shape.aliases import Aliases
from fxopt.shape.fewest_steps import steps_of
from fxopt.shape.sizes import is_tensor, same_shape, same_sizes, shape_of, static, tensor_of
from fxopt.shape.strides import Layout, reads_once
from fxopt.shape.view_operators import RESHAPES, joined_dim
from fxopt.shape.view_steps import Permute, Reshape, Select, Slice, Step
from fxopt.shape.views import View

aten = torch.ops.aten


@dataclass(frozen=True)
class Join:
    """A cat or stack of tensor nodes. dim is not negative."""

    node: Node
    inputs: tuple[Node, ...]
    dim: int

    @property
    def is_stack(self) -> bool:
        return self.node.target is aten.stack.default

    @classmethod
    def of(cls, node: Node) -> Join | None:
        if node.target not in (aten.cat.default, aten.stack.default):
            return None
        inputs = node.args[0]
        if not isinstance(inputs, list | tuple) or not inputs or tensor_of(node) is None:
            return None
        if not all(is_tensor(item) for item in inputs):
            return None
        if any(item.meta["val"].dtype != node.meta["val"].dtype for item in inputs):  # type: ignore[union-attr]
            return None
        return cls(node, tuple(inputs), joined_dim(node))  # type: ignore[arg-type]


def find_cats(search: Search) -> Iterator[Match | Reject]:
    """Every cat or stack that fewer operators can give."""
    if search.changes_modes:
        return
    aliases = search.aliases
    cats = _Cats(aliases, ViewChains(search))
    for node in search.graph.nodes:
        if aliases.edited(node):
            continue
        join = Join.of(node)
        if join is not None:
            match = cats.taken_apart(join) or cats.joined(join) or cats.as_stack(join)
        else:
            match = cats.as_cat(node)
        if match is not None:
            yield match


class _Cats:
    def __init__(self, aliases: Aliases, chains: ViewChains) -> None:
        self.aliases, self.chains, self.fresh = aliases, chains, Freshness(aliases)

    def joined(self, join: Join) -> Match | None:
        """Inner cats written out, empty inputs left out, neighbours read as one slice."""
        inner, inputs = self._written_out(join)
        runs = list(merged(self._runs(join, inputs), join.dim))
        if join.is_stack and len(runs) > 1:
            return None
        ways = [self._steps(run) for run in runs]
        if any(way is None for way in ways) or any(self.aliases.edited(run.source) for run in runs):
            return None
        steps = [way for way in ways if way is not None]
        if 1 + len(inner) + len(self._freed(runs)) <= sum(map(len, steps)) + (len(runs) > 1):
            return None
        if len(runs) == 1 and not self._may_become(join.node, runs[0].source, steps[0]):
            return None
        reads = tuple(run.source for run in runs)
        return Match(join.node, {"reads": reads, "steps": tuple(steps), "dim": join.dim})

    def as_stack(self, join: Join) -> Match | None:
        """A cat of tensors that were all unsqueezed for it."""
        if join.is_stack:
            return None
        roots = [self.chains.of(item).root for item in join.inputs]
        freed = sum(len(item.users) == 1 for item in join.inputs)
        pairs = zip(join.inputs, roots, strict=True)
        if freed == 0 or not all(_is_unsqueezed(item, root, join.dim) for item, root in pairs):
            return None
        if any(map(self.aliases.edited, roots)):
            return None
        return Match(join.node, {"reads": tuple(roots), "stack": join.dim})

    def as_cat(self, node: Node) -> Match | None:
        """A stack whose new axis is merged with the next one."""
        source = node.args[0] if node.target in RESHAPES and node.args else None
        join = Join.of(source) if isinstance(source, Node) else None
        if join is None or not join.is_stack or len(join.node.users) > 1 or self.aliases.edited(join.node):
            return None
        dim, shape = join.dim, shape_of(join.node)
        if dim + 1 == len(shape) or any(map(self.aliases.edited, join.inputs)):
            return None
        flat = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return Match(node, {"reads": join.inputs, "cat": dim}) if same_sizes(flat, shape_of(node)) else None

    def taken_apart(self, join: Join) -> Match | None:
        """A cat that is only ever read in the pieces it was made of."""
        if any(map(self.aliases.edited, join.inputs)):
            return None
        sizes = None if join.is_stack else [shape_of(item)[join.dim] for item in join.inputs]
        pieces = pieces_of(join.node, join.dim, sizes)
        if not pieces or not all(self._is_same(piece, join.inputs[index]) for piece, index in pieces.items()):
            return None
        values = {piece: join.inputs[index] for piece, index in pieces.items()}
        return Match(join.node, {"pieces": tuple(values), "reads": tuple(values.values())})

    def _is_same(self, piece: Node, item: Node) -> bool:
        return same_shape(piece, item) and self._may_become(piece, item, [])

    def _may_become(self, node: Node, source: Node, steps: Sequence[Step]) -> bool:
        """Whether nothing can tell a fresh tensor from this view of `source`."""
        strides = self.chains.strides
        known = min([strides.known(source), *map(_kept_by, steps)])
        if any(isinstance(step, Permute) for step in steps) and not all(map(reads_once, node.users)):
            return False  # the copy that the cat makes is worth its time
        return strides.asked(node) <= min(strides.known(node), known) and self.fresh.survives(node, source)

    def _written_out(self, join: Join) -> tuple[list[Node], list[Node]]:
        """(what nothing else needs, all the inputs)."""
        inner, inputs = [], []
        for item in join.inputs:
            below = None if join.is_stack or len(item.users) > 1 or self.aliases.edited(item) else Join.of(item)
            if below is None or below.is_stack or below.dim != join.dim or any(map(self.aliases.edited, below.inputs)):
                inputs.append(item)
                continue
            nested, items = self._written_out(below)
            inner += [item, *nested]
            inputs += items
        if not join.is_stack:
            empty = [item for item in inputs if _is_empty(item, len(shape_of(join.node)), join.dim)]
            if len(empty) < len(inputs):
                inner += [item for item in empty if len(item.users) == 1]
                inputs = [item for item in inputs if item not in empty]
        return inner, inputs

    def _runs(self, join: Join, inputs: Sequence[Node]) -> Iterator[Run]:
        """The inputs one by one; the pieces of a whole split, whose sizes may depend on data, are its source."""
        position = 0
        while position < len(inputs):
            item = inputs[position]
            count = 0 if join.is_stack else whole_split(inputs, position, join.dim)
            if count:
                source: Node = item.args[0].args[0]  # type: ignore[assignment, union-attr]
                yield Run(source, View.of(shape_of(source)), tuple(inputs[position : position + count]))
            else:
                seen = self.chains.of(item)
                view = seen.view.unsqueeze(join.dim) if join.is_stack else seen.view
                yield Run(seen.base, view, (item,))
            position += count or 1

    def _steps(self, run: Run) -> list[Step] | None:
        return steps_of(run.view, shape_of(run.base)) if run.is_merged else []

    def _freed(self, runs: Sequence[Run]) -> set[Node]:
        """The operators behind merged inputs that nothing else needs."""
        freed: set[Node] = set()
        for run in runs:
            if not run.is_merged:
                continue
            for item in run.inputs:
                if len(item.users) > 1 or item is run.base:
                    continue
                freed.update(self.chains.freed(item, run.base))
                if item.target is operator.getitem and item.args[0].users.keys() <= set(run.inputs):  # type: ignore[union-attr]
                    freed.add(item.args[0])  # type: ignore[arg-type]
        return freed


def _kept_by(step: Step) -> Layout:
    """How much of contiguous strides is left after a step."""
    if isinstance(step, Reshape):
        return Layout.CONTIGUOUS
    return Layout.ORDERED if isinstance(step, Slice | Select) else Layout.ANY


def _is_unsqueezed(item: Node, root: Node, dim: int) -> bool:
    """Whether `item` is `root` with a new axis at `dim`."""
    shape = shape_of(item)
    return static(shape[dim]) == 1 and same_sizes(shape_of(root), (*shape[:dim], *shape[dim + 1 :]))


def _is_empty(item: Node, rank: int, dim: int) -> bool:
    """A tensor that adds nothing to a cat; torch takes one of shape [0] for any rank."""
    shape = shape_of(item)
    return len(shape) != rank or static(shape[dim]) == 0
