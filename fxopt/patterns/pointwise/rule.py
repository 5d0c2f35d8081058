"""How one ATen operator is told in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.pointwise.plan import Operand
from fxopt.patterns.pointwise.axes import Axes, Dims
from fxopt.patterns.pointwise.program import Program
from fxopt.shape.sizes import shape_of


@dataclass(frozen=True)
class Call:
    """A node while its steps are written.

    values: by position, of the tensor arguments. dims: of those and of the result, in numbered axes.
    """

    node: Node
    program: Program
    values: dict[int, int]
    dims: dict[int, Dims]
    result: Dims

    def operand(self, position: int, default: float = 0.0) -> Operand:
        if position in self.values:
            return self.values[position]
        return float(argument(self.node, position, default))

    def do(self, op: str, *operands: Operand) -> int:
        return self.program.elementwise(op, *operands)


@dataclass(frozen=True)
class Rule:
    """shape: the dims of the result from those of the arguments; steps: the value of the result; over: the dims of its
    argument that it goes over, where it does the same at each place of the others.
    """

    shape: Callable[[Node, Axes, dict[int, Dims]], Dims]
    steps: Callable[[Call], int]
    over: Callable[[Node], Sequence[int]] | None = None

    def takes_constant(self, node: Node, dims: set[int]) -> bool:
        """Whether these dims of an argument may be constant, although their sizes are not 1."""
        if self.shape is broadcast or not dims:
            return True
        return self.over is not None and dims.isdisjoint(self.over(node))


def argument(node: Node, position: int, default: Any = None) -> Any:
    """An argument by position, given by keyword or not at all."""
    if position < len(node.args):
        return node.args[position]
    name = node.target._schema.arguments[position].name  # type: ignore[union-attr]
    return node.kwargs.get(name, default)


def tensors(node: Node) -> dict[int, Node]:
    """The tensor arguments by position; lists of tensors and unknown keywords count as none."""
    count = len(node.target._schema.arguments)  # type: ignore[union-attr]
    found = {position: argument(node, position) for position in range(count)}
    return {
        position: value
        for position, value in found.items()
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
    }


def broadcast(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    return axes.broadcast(shape_of(node), dims.values())
