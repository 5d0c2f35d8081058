"""What follows the scores: scaling, masks, a softmax, and the sum of the values that the scores weigh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.target_attention import plan as p
from fxopt.kernels.target_attention.plan import TailStep
from fxopt.patterns.constants import constant_of
from fxopt.patterns.target_attention.layout import Layout, Sizes, has, to_rows, viewed
from fxopt.patterns.target_attention.terms import Source
from fxopt.shape.calls import FILLS, ancestors
from fxopt.shape.sizes import is_tensor, same, shape_of, static, tensor_of
from fxopt.shape.view_operators import REGROUPS

aten = torch.ops.aten
_SCALARS = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), lambda number: TailStep(p.SCALE, -1, number)),
    aten.div.Tensor: lambda number: TailStep(p.SCALE, -1, 1 / number) if number else None,
    aten.div.Scalar: lambda number: TailStep(p.SCALE, -1, 1 / number) if number else None,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), lambda number: TailStep(p.SHIFT, -1, number)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda number: TailStep(p.SHIFT, -1, -number)),
}


@dataclass
class Tail:
    """Follows the scores through users that nobody else shares. `node`, of `layout`, is what the steps so far give."""

    sizes: Sizes
    dtype: torch.dtype
    edited: Callable[[Node], bool]
    node: Node
    layout: Layout
    steps: list[TailStep] = field(default_factory=list)
    masks: list[Source] = field(default_factory=list)
    values: Source | None = None
    width: int = 1

    def follow(self) -> None:
        """As far as a plan can say it."""
        while self.values is None:
            users = [user for user in self.node.users if constant_of(user) is None]  # not zeros_like: it reads sizes
            if len(users) != 1:
                return
            (user,) = users
            if user.op != "call_function" or tensor_of(user) is None or user.meta["val"].dtype != self.dtype:
                return
            if self.edited(user) or not (self._summed(user) or self._viewed(user) or self._scored(user)):
                return

    def _moved(self, user: Node, layout: Layout) -> bool:
        self.node, self.layout = user, layout
        return True

    def _viewed(self, user: Node) -> bool:
        layout = viewed(user, self.layout, self.sizes, 1)
        return layout is not None and self._moved(user, layout)

    def _scored(self, user: Node) -> bool:
        """A step that keeps [B, T]."""
        if not has(shape_of(user), self.layout, self.sizes, 1):
            return False
        steps, masks = len(self.steps), len(self.masks)
        if self._step(user) and len(self.steps) > steps:
            return self._moved(user, self.layout)
        del self.masks[masks:]
        return False

    def _step(self, user: Node) -> bool:
        arguments = user.args
        if user.target is aten.softmax.int:
            if user.kwargs or (len(arguments) > 2 and arguments[2] is not None):
                return False
            if self.layout[int(arguments[1]) % len(self.layout)] != "T":  # type: ignore[arg-type]
                return False
            return self._add(TailStep(p.SOFTMAX))
        if user.target is aten.where.self:
            mask, one, two = arguments
            if one is self.node:
                return self._filled(p.FILL, mask, two)
            return two is self.node and self._filled(p.FILL_WHERE, mask, one)
        if user.target in FILLS:
            return arguments[0] is self.node and self._filled(p.FILL_WHERE, arguments[1], arguments[2])
        if user.kwargs or len(arguments) != 2 or user.target not in _SCALARS:
            return False
        left, right = arguments
        number = constant_of(right if left is self.node else left)
        swappable = user.target in (aten.mul.Tensor, aten.add.Tensor)
        if left is not self.node and not (swappable and right is self.node):
            return False
        if number is not None:
            step = _SCALARS[user.target](float(number))
            return step is not None and self._add(step)
        operation = {aten.mul.Tensor: p.TIMES_MASK, aten.add.Tensor: p.PLUS_MASK}.get(user.target)
        other = right if left is self.node else left
        return operation is not None and other is not self.node and self._masked(operation, other)

    def _add(self, step: TailStep) -> bool:
        self.steps.append(step)
        return True

    def _filled(self, operation: int, mask: Any, value: Any) -> bool:
        number = _number(value)
        if number is None or not isinstance(mask, Node) or mask.meta["val"].dtype != torch.bool:
            return False
        return self._masked(operation, mask, float(number))

    def _masked(self, operation: int, mask: Any, value: float = 0.0) -> bool:
        if not is_tensor(mask) or self.edited(mask) or self.node in ancestors([mask]):
            return False
        dtype = mask.meta["val"].dtype
        if dtype.is_complex or (dtype.is_floating_point and dtype != self.dtype):
            return False
        views = to_rows(mask, self.layout, self.sizes)
        if views is None:
            return False
        if dtype != self.dtype and dtype != torch.bool:
            views = (*views, (aten.to.dtype, self.dtype))
        source = Source(mask, views)
        if source not in self.masks:
            self.masks.append(source)
        return self._add(TailStep(operation, self.masks.index(source), value))

    def _summed(self, user: Node) -> bool:
        """The sum over T of scores times values, by one product or by mul and sum."""
        if user.target in (aten.matmul.default, aten.bmm.default):
            return self._product(user, *user.args)
        if user.target is aten.mul.Tensor and not user.kwargs:
            left, right = user.args
            other = right if left is self.node else left
            total = next(iter(user.users), None)
            if other is self.node or not isinstance(other, Node) or len(user.users) != 1 or total is None:
                return False
            return self._multiplied(user, total, other)
        return False

    def _product(self, user: Node, left: Any, right: Any) -> bool:
        if left is self.node and self.layout == ("B", "1", "T"):
            return self._taken(user, right, (), ("B", "1", "C"))
        if right is self.node and self.layout == ("B", "T", "1"):
            return self._taken(user, left, ((aten.transpose.int, 1, 2),), ("B", "C", "1"))
        return False

    def _multiplied(self, product: Node, total: Node, other: Node) -> bool:
        """(scores [B, T, 1] * values [B, T, D]).sum(1)"""
        if total.target is not aten.sum.dim_IntList or total.kwargs or self.layout != ("B", "T", "1"):
            return False
        dims: Any = total.args[1]
        if len(shape_of(product)) != 3 or list(dims) not in ([1], [-2]) or self.edited(product) or self.edited(total):
            return False
        keeps = len(total.args) > 2 and bool(total.args[2])
        return self._taken(total, other, (), ("B", "1", "C") if keeps else ("B", "C"))

    def _taken(self, end: Node, values: Any, views: tuple, layout: Layout) -> bool:
        if not is_tensor(values) or self.edited(values):
            return False
        shape = shape_of(values)
        if len(shape) != 3 or values.meta["val"].dtype != self.dtype:
            return False
        B, T, D = (shape[0], shape[2], shape[1]) if views else shape
        width = static(D)
        if width is None or not same(B, self.sizes.B) or not same(T, self.sizes.T) or self.node in ancestors([values]):
            return False
        self.values, self.width = Source(values, views), width
        return self._moved(end, layout)


def _number(value: Any) -> float | None:
    """What a tensor holds everywhere, behind views too: ones_like(x) * -1e9."""
    number = constant_of(value)
    if number is not None or not isinstance(value, Node) or not value.args:
        return number
    if value.target is aten.mul.Tensor:
        left, right = map(_number, value.args)
        return None if left is None or right is None else left * right
    is_view = value.target in REGROUPS or value.target in (aten.transpose.int, aten.expand.default)
    return _number(value.args[0]) if is_view else None
