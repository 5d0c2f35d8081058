"""What one call computes, as data: inputs, steps, outputs over a few axes.

Every value has some of the plan's axes, in their order; what it lacks it is constant along. Value k is input k, then
the result of step k - len(inputs). An elementwise step reads values of exactly its own axes, so a broadcast is a step
of its own ("expand"). Booleans are 0.0 and 1.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MOST_AXES = 6
UNARY = (
    "copy", "neg", "abs", "exp", "log", "log1p", "tanh", "sigmoid", "silu", "gelu", "erf", "relu", "sqrt", "rsqrt",
    "reciprocal", "square", "softplus", "not", "isnan",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "lt", "le", "gt", "ge", "eq", "ne",
    "and", "or", "xor", "leaky_relu", "prelu",
)  # fmt: skip
TERNARY = ("where", "fma")  # fma: a * b + c, rounded once
CONSTANT = ("not", "isnan", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "peak")  # they have no gradient
REDUCTIONS = ("sum", "mean", "amax", "amin", "peak")  # peak: amax without a gradient, for softmax
OPS = (*UNARY, *BINARY, *TERNARY, *REDUCTIONS, "expand")

Operand = int | float  # a value's number, or a constant


@dataclass(frozen=True)
class Input:
    """A tensor. dims: for each of its dims the axis it runs along, or None where its size is 1."""

    dims: tuple[int | None, ...]

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(axis for axis in self.dims if axis is not None)


@dataclass(frozen=True)
class Step:
    """One operation; `axes` are those of its result."""

    op: str
    operands: tuple[Operand, ...]
    axes: frozenset[int]


@dataclass(frozen=True)
class Output:
    """A step's value as a tensor, contiguous. dims: its axes in order, None for a size of 1."""

    value: int
    dims: tuple[int | None, ...]
    boolean: bool = False


@dataclass(frozen=True)
class Plan:
    """axes: how many; every output runs along axis 0, and no reduction goes over it."""

    axes: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def axes_of(self, value: int) -> frozenset[int]:
        n = len(self.inputs)
        return self.inputs[value].axes if value < n else self.steps[value - n].axes

    @property
    def outer(self) -> int:
        """How many leading axes are rows: every output has them, and no reduction goes over them."""
        missing = {axis for output in self.outputs for axis in range(self.axes) if axis not in output.dims}
        for step in self.steps:
            if step.op in REDUCTIONS:
                missing |= self.axes_of(int(step.operands[0])) - step.axes
        return min(missing, default=self.axes)

    @functools.cached_property
    def differentiable(self) -> tuple[frozenset[int], ...]:
        """For each output the inputs that it has a gradient in."""
        reached = [frozenset([number]) for number in range(len(self.inputs))]
        for step in self.steps:
            read = step.operands[1:] if step.op == "where" else () if step.op in CONSTANT else step.operands
            reached.append(frozenset().union(*(reached[value] for value in read if isinstance(value, int))))
        return tuple(frozenset() if output.boolean else reached[output.value] for output in self.outputs)
