"""What each element of a tensor is a product of: vectors of fields, their products, and their dot products.

Cats, slices, index lists, matrix products, einsums and loops over pairs only move such terms about. Followed element by
element, every spelling of an interaction becomes the same list of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, is_float32, same, shape_of, static
from fxopt.shape.view_operators import viewed
from fxopt.shape.views import View

BATCH, FIELD, LANE = "bfl"
MOST_FIELDS = 256  # the Gram matrix of a row stays in the cache
MOST_TERMS = 1 << 17
NOTHING = -1  # a term that is zero


@dataclass(frozen=True)
class Value:
    """Terms of a tensor.

    axes: what each dim of the tensor is: the batch, fields, or lanes (the elements of a vector).
    terms: int64 over the field dims in order, and a last one with the vectors that are multiplied, 1 or 2.
    B, D: sizes of the batch and of a vector.
    """

    axes: str
    terms: Tensor
    B: Size
    D: int

    @property
    def is_dots(self) -> bool:
        return LANE not in self.axes

    @property
    def is_vectors(self) -> bool:
        return LANE in self.axes and self.terms.shape[-1] == 1


Rule = Callable[["Terms", Node], Value | None]


class Terms:
    """The terms of a graph's nodes, worked out where they are asked for.

    rules: of the operators that are no views, by target; a rule gives None where it does not hold.
    """

    def __init__(self, aliases: Aliases, rules: Mapping[object, Rule]) -> None:
        self.aliases = aliases
        self.rules = rules
        self.fields: list[tuple[Node, int]] = []  # by number: a tensor, and which of its vectors
        self._values: dict[Node, Value | None] = {}

    def of(self, node: Node) -> Value | None:
        """None where a node is neither made of vectors nor may be one: only float32 on the CPU is."""
        if node not in self._values:
            self._values[node] = None  # for a cycle there is none
            if is_float32(node, "cpu"):
                self._values[node] = self._followed(node) or self._base(node)
        return self._values[node]

    def known(self, node: Node) -> Value | None:
        """What was worked out of a node already."""
        return self._values.get(node)

    def values(self) -> list[tuple[Node, Value]]:
        """All that was worked out so far."""
        return [(node, value) for node, value in self._values.items() if value is not None]

    def _base(self, node: Node) -> Value | None:
        """A tensor of vectors, as it comes: [B, D] or [B, F, D]."""
        shape = shape_of(node)
        D = static(shape[-1]) if len(shape) in (2, 3) else None
        F = static(shape[1]) if len(shape) == 3 else 1
        if not D or not F or F > MOST_FIELDS:
            return None
        start = len(self.fields)
        self.fields += [(node, f) for f in range(F)]
        terms = torch.arange(start, start + F, device="cpu").unsqueeze(1)
        return Value("bfl", terms, shape[0], D) if len(shape) == 3 else Value("bl", terms[0], shape[0], D)

    def _followed(self, node: Node) -> Value | None:
        if node.op != "call_function" or self.aliases.edited(node):
            return None
        rule = self.rules.get(node.target)
        if rule is not None:
            return rule(self, node)
        found = viewed(node)
        source = self.of(found[0]) if found is not None and not self.aliases.edited(found[0]) else None
        return _viewed(source, found[1]) if found is not None and source is not None else None

    def operands(self, nodes: Sequence[object]) -> list[Value] | None:
        """Values of one batch and one size of vector."""
        values = [self.of(node) if isinstance(node, Node) else None for node in nodes]
        if not values or any(value is None for value in values):
            return None
        first, *others = found = [value for value in values if value is not None]
        return found if all(same(first.B, other.B) and first.D == other.D for other in others) else None


def _viewed(value: Value, view: View) -> Value | None:
    """The value through a view of its tensor."""
    fields = [dim for dim, kind in enumerate(value.axes) if kind == FIELD]
    cuts: dict[int, int | slice] = dict(view.fixed)  # type: ignore[arg-type]
    axes = ""
    order: list[int] = []
    shape: list[int] = []
    for axis in view.axes:
        kinds = {value.axes[part.dim] for part in axis.parts}
        if kinds <= {FIELD}:
            size = static(axis.size)
            if size is None or (axis.spread is not None and axis.parts):
                return None
            cuts |= {part.dim: slice(part.start, part.start + (static(part.size) or 0)) for part in axis.parts}
            order += [part.dim for part in axis.parts]
            axes, shape = axes + FIELD, [*shape, size]
        elif len(axis.parts) == 1 and axis.parts[0].start == 0 and axis.parts[0].whole and axis.spread is None:
            axes += kinds.pop()
        else:
            return None
    if sorted(axes.replace(FIELD, "")) != sorted(value.axes.replace(FIELD, "")) or cuts.keys() != set(fields):
        return None
    terms = value.terms[tuple(cuts[dim] for dim in fields)]
    left = [dim for dim in fields if isinstance(cuts[dim], slice)]
    terms = terms.permute([left.index(dim) for dim in order] + [len(left)])
    spread = [axis.spread is not None for axis in view.axes if {value.axes[part.dim] for part in axis.parts} <= {FIELD}]
    narrow = [1 if wide else size for wide, size in zip(spread, shape, strict=True)]
    if math.prod(narrow) * terms.shape[-1] != terms.numel() or math.prod(shape) > MOST_TERMS:
        return None
    return Value(axes, terms.reshape(*narrow, -1).expand(*shape, -1), value.B, value.D)
