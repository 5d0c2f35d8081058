"""How one ATen operator is told in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxopt.kernels.pointwise.plan import Operand
from fxopt.patterns.pointwise.axes import Axes, Dims
from fxopt.patterns.pointwise.program import Program
from fxopt.shape.calls import arguments_of
from fxopt.shape.sizes import is_tensor, shape_of


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

    def operand(self, position: int) -> Operand:
        return self.values[position] if position in self.values else float(argument(self.node, position))

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


def argument(node: Node, position: int) -> Any:
    """An argument by position, given by keyword or by default."""
    return list(arguments_of(node).values())[position]


def tensors(node: Node) -> dict[int, Node]:
    """The tensor arguments by position; lists of tensors and unknown keywords count as none."""
    return {position: value for position, value in enumerate(arguments_of(node).values()) if is_tensor(value)}


def broadcast(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    return axes.broadcast(shape_of(node), dims.values())
