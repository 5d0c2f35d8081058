"""What a rule of value ranges sees: one node, its arguments by name, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxopt.shape.calls import arguments_of
from fxopt.shape.ranges.algebra import MOST, cast, size_values
from fxopt.shape.ranges.values import Values

if TYPE_CHECKING:
    from fxopt.shape.ranges.analysis import Ranges

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


def either(*known: Known) -> Known:
    """One of these: data movement, `where`."""
    values = known[0].values
    for other in known[1:]:
        values = values | other.values
    texts = dict.fromkeys(one.because for one in known if one.because)
    joined = "; ".join(texts)
    return Known(values, joined if len(joined) <= _LONGEST else f"{next(iter(texts))}; and others")


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

    def tensor(self, name: str) -> torch.Tensor:
        """The fake tensor behind an argument."""
        value = self[name]
        assert isinstance(value, Node)
        return value.meta["val"]

    def tensors(self, name: str) -> list[Known]:
        """`known` of each tensor in a list; those that only index, the Nones of x[:, i], are left out."""
        value = self[name]
        assert isinstance(value, list | tuple)
        return [self.ranges.of_value(item) for item in value if item is not None]

    def size(self, name: str, dims: object = None) -> Values:
        """How many elements the argument has along a dim, some dims, or in all (None)."""
        shape = self.tensor(name).shape
        chosen = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        assert isinstance(chosen, Iterable)
        low, high = 1, 1
        for dim in chosen if shape else ():
            values = size_values(shape[dim])
            low, high = low * max(0, int(values.min)), min(MOST, high * int(values.max))
        return Values.between(min(low, high), high)

    def operand(self, name: str) -> Known:
        """`known`, promoted to the output's dtype as torch does before it computes."""
        known = self.known(name)
        return replace(known, values=cast(known.values, self.dtype)) if self.dtype is not None else known


Rule = Callable[[Operation], Known | None]
"""What an operator's output can be; None: anything."""
