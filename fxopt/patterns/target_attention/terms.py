"""What is concatenated in front of the first layer, as sums of products of a row's query and a position's key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.target_attention.plan import Term
from fxopt.patterns.constants import constant_of
from fxopt.patterns.target_attention.layout import Sizes
from fxopt.shape.sizes import same, same_sizes, shape_of, static
from fxopt.shape.view_operators import EXPANSIONS, REGROUPS, REPEATS

aten = torch.ops.aten

Form = dict[tuple[int, int], float]  # (row source, position source; -1: none) -> factor


@dataclass(frozen=True)
class Source:
    """A tensor, and the view operators (target, *arguments) that make the operator's input of it."""

    node: Node
    views: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Terms:
    """Collects the sources of the operands of one concatenation [B, T, K]."""

    sizes: Sizes
    edited: Callable[[Node], bool]
    rows: list[Source] = field(default_factory=list)
    positions: list[Source] = field(default_factory=list)

    def of(self, operands: list[Node]) -> Iterator[Term]:
        start = 0
        for operand in operands:
            width = static(shape_of(operand)[2])
            assert width is not None
            for (row, position), factor in self._form(operand, width).items():
                yield Term(row, position, start, width, factor)
            start += width

    def _form(self, node: Node, width: int) -> Form:
        """What an operand [B, T, width] is; a tensor of positions where it is nothing simpler."""
        return self._known(node, width) or {(-1, _number(self.positions, Source(node))): 1.0}

    def _known(self, node: Node, width: int) -> Form | None:
        row = self._row(node, width)
        if row is not None:
            return {(_number(self.rows, row), -1): 1.0}
        if self.edited(node):
            return None
        if node.target in (aten.sub.Tensor, aten.add.Tensor) and not node.kwargs:
            sign = -1.0 if node.target is aten.sub.Tensor else 1.0
            left, right = (self._operand(operand, width) for operand in node.args[:2])
            return None if left is None or right is None else _sum(left, right, sign)
        if node.target is aten.mul.Tensor:
            return self._product(node.args[0], node.args[1], width)
        if node.target is aten.neg.default:
            inner = self._operand(node.args[0], width)
            return None if inner is None else _sum({}, inner, -1.0)
        return None

    def _product(self, left: Any, right: Any, width: int) -> Form | None:
        for factor, other in ((constant_of(left), right), (constant_of(right), left)):
            if factor is not None:
                inner = self._operand(other, width)
                return None if inner is None else _sum({}, inner, float(factor))
        forms = self._operand(left, width), self._operand(right, width)
        for one, two in (forms, forms[::-1]):
            if one is None or two is None or len(one) != 1 or len(two) != 1:
                return None
            ((row, none), first), ((nobody, position), second) = *one.items(), *two.items()
            if none < 0 and nobody < 0 and row >= 0 and position >= 0:
                return {(row, position): first * second}
        return None

    def _operand(self, node: Any, width: int) -> Form | None:
        """An operand of arithmetic on [B, T, width], which may broadcast."""
        if not isinstance(node, Node):
            return None
        shape = shape_of(node)
        if len(shape) == 3 and same(shape[2], width) and same(shape[0], self.sizes.B):
            if static(shape[1]) == 1:
                return {(_number(self.rows, Source(node, ((aten.select.int, 1, 0),))), -1): 1.0}
            if same(shape[1], self.sizes.T):
                return self._form(node, width)
        return None

    def _row(self, node: Node, width: int) -> Source | None:
        """[B, T, width] as one [B, width] for all positions."""
        if not same_sizes(shape_of(node)[:-1], (self.sizes.B, self.sizes.T)):
            return None
        inner = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if inner is None or self.edited(node):
            return None
        if node.target in REPEATS and (single := self._single(inner, width)) is not None:
            return single
        if node.target in EXPANSIONS:
            sizes = (1,) * (3 - len(shape_of(inner))) + shape_of(inner)
            spread = static(sizes[1]) == 1 and same(sizes[2], width)
            return Source(node, ((aten.select.int, 1, 0),)) if spread else None
        return self._repeated(inner, width) if node.target in REGROUPS else None

    def _single(self, inner: Node, width: int) -> Source | None:
        if not same_sizes(shape_of(inner), (self.sizes.B, 1, width)) or self.edited(inner):
            return None
        return Source(inner, ((aten.select.int, 1, 0),))

    def _repeated(self, inner: Node, width: int) -> Source | None:
        """q.repeat(1, T).view(B, T, D), or q.repeat_interleave(T, 0).view(B, T, D), of q [B, D]."""
        query = inner.args[0] if inner.args and isinstance(inner.args[0], Node) else None
        if query is None or self.edited(query) or self.edited(inner):
            return None
        sizes, made = shape_of(query), shape_of(inner)
        tiled = inner.target is aten.repeat.default and len(made) == len(sizes) and same(made[0], self.sizes.B)
        if same_sizes(sizes, (self.sizes.B, 1, width)):
            return Source(query, ((aten.select.int, 1, 0),)) if tiled else None
        by_rows = inner.target is aten.repeat_interleave.self_int and inner.args[2:] in ((0,), (-2,))
        return Source(query) if same_sizes(sizes, (self.sizes.B, width)) and (tiled or by_rows) else None


def _number(sources: list[Source], source: Source) -> int:
    if source not in sources:
        sources.append(source)
    return sources.index(source)


def _sum(left: Form, right: Form, factor: float) -> Form:
    total = dict(left)
    for key, value in right.items():
        total[key] = total.get(key, 0.0) + factor * value
    return total
