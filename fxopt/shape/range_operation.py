"""What a rule of value ranges sees: one node, its arguments by name, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.shape.range_algebra import cast
from fxopt.shape.values import Values

if TYPE_CHECKING:
    from fxopt.shape.ranges import Ranges

_LONGEST = 90  # characters of a `because`


@dataclass(frozen=True)
class Known:
    """What a tensor's elements can be, and why: "remainder by 1000"."""

    values: Values
    because: str

    def then(self, values: Values, step: str) -> Known:
        """`values` follow from this by one more step, told as "bucketize over 100 edges, plus 1"."""
        text = f"{self.because}, {step}" if self.because else step
        return Known(values, text if len(text) <= _LONGEST else step)


class Operation:
    """One node for its rule: arguments by their names in the schema, and what is known of them.

    dtype: of the (first) output; None where it is not a tensor.
    """

    def __init__(self, ranges: Ranges, node: Node) -> None:
        self.ranges, self.node = ranges, node
        value = node.meta.get("val")
        self.dtype: torch.dtype | None = value.dtype if isinstance(value, torch.Tensor) else None
        self._arguments = arguments_of(node)

    def __getitem__(self, name: str) -> object:
        """The argument called `name`, None where the operator has no such argument."""
        return self._arguments.get(name)

    def known(self, name: str) -> Known:
        """Of a tensor, a size or a number; nothing but its dtype where that is all."""
        return self.ranges.of_value(self[name])

    def operand(self, name: str) -> Known:
        """`known`, promoted to the output's dtype as torch does before it computes."""
        known = self.known(name)
        return replace(known, values=cast(known.values, self.dtype)) if self.dtype is not None else known


def arguments_of(node: Node) -> dict[str, object]:
    """Arguments by name, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(enumerate(node.args)) | dict(node.kwargs)  # type: ignore[arg-type,return-value]
    schema = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}
