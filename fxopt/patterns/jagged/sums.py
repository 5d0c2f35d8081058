"""Integer tensors as sums of lengths: the offsets and sizes that a model computes from the lengths of its bags.

Before(n, e) is the number of ids in front of bag e, by the lengths tensor with number n. Every element of such a tensor
is a sum of these: lengths[i] is Before(i + 1) - Before(i), their cumsum is Before(i + 1) - Before(0), and a batch of B
bags of feature k has Before(k * B + B) - Before(k * B) ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fxopt.patterns.jagged.cuts import cut_of
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import Size, expression, product, same, shape_of, tensor_of
from fxopt.shape.view_operators import through
from fxopt.shape.view_steps import Contiguous, Reshape, Select

aten = torch.ops.aten
ITEMS = (aten.item.default, aten._local_scalar_dense.default)
_AXES = sympy.symbols("axis0:8", integer=True)
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


class Before(sympy.Function):
    """The number of ids in front of a bag."""

    @classmethod
    def eval(cls, number: sympy.Expr, bag: sympy.Expr) -> sympy.Expr | None:
        plain = sympy.expand(bag)
        if plain.is_zero:
            return sympy.Integer(0)
        return None if plain == bag else cls(number, plain)


class Sums:
    """Of one graph: what its integer tensors are, in terms of the lengths they were computed from.

    Attributes:
        lengths: the tensors that count as lengths, by their numbers.
    """

    def __init__(self, graph: Graph, aliases: Aliases) -> None:
        self.lengths: list[Node] = []
        self._bags: list[dict[sympy.Expr, None]] = []
        self._aliases = aliases
        self._seen: dict[Node, sympy.Expr | None] = {}
        self._items: dict[sympy.Basic, Node] = {}
        for node in graph.nodes:
            if node.target in ITEMS and isinstance(node.meta.get("val"), torch.SymInt):
                self._items.setdefault(expression(node.meta["val"]), node)

    def of(self, node: Node) -> sympy.Expr | None:
        """The element at (axis0, axis1, ...) of an integer tensor; None for any other tensor."""
        if node not in self._seen:
            self._seen[node] = self._found(node)
        return self._seen[node]

    def at_bag(self, node: Node, bag: sympy.Expr) -> sympy.Expr | None:
        """The element at `bag` of a 1-D tensor."""
        value = self.of(node) if len(shape_of(node)) == 1 else None
        return None if value is None else value.xreplace({_AXES[0]: bag})

    def bags(self, number: int) -> list[sympy.Expr]:
        """How many lengths there are, in each way in which the model spells it (F * B where they become [F, B])."""
        for user in self.lengths[number].users:
            self.of(user)
        return list(self._bags[number])

    def number_of(self, node: Node) -> int | None:
        """Of a tensor that holds lengths in their order."""
        value = self.of(node)
        numbers = {int(term.args[0]) for term in value.atoms(Before)} if value is not None else ()
        return next((n for n in numbers if value == sympy.expand(self._plain(n, shape_of(node)))), None)

    def number(self, term: sympy.Expr) -> sympy.Expr:
        """A number of the graph with each item of a tensor replaced by what it is."""
        known = {symbol: self.of(self._items[symbol].args[0]) for symbol in term.free_symbols & self._items.keys()}  # type: ignore[arg-type]
        return sympy.expand(term.xreplace({symbol: value for symbol, value in known.items() if value is not None}))

    def _found(self, node: Node) -> sympy.Expr | None:
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype not in (torch.int32, torch.int64) or self._aliases.edited(node):
            return None
        handler = _HANDLERS.get(node.target.name().partition(".")[0]) if hasattr(node.target, "name") else None
        value = handler(self, node, *node.args) if handler and node.args else self._viewed(node)
        return sympy.expand(value) if value is not None else self._lengths(node)

    def _lengths(self, node: Node) -> sympy.Expr | None:
        """A tensor that is computed from no other lengths."""
        if not node.meta["val"].dim():
            return None
        self.lengths.append(node)
        self._bags.append({expression(product(shape_of(node))): None})
        return self._plain(len(self.lengths) - 1, shape_of(node))

    def _plain(self, number: int, shape: Sequence[Size]) -> sympy.Expr:
        """Lengths in their order, as a tensor of any shape."""
        at = sympy.Integer(0)
        for axis, size in zip(_AXES, shape, strict=False):
            at = at * expression(size) + axis
        return Before(number, at + 1) - Before(number, at)

    def _viewed(self, node: Node) -> sympy.Expr | None:
        cut = cut_of(node)
        if cut is not None:
            value, begin = self.of(cut.source), self.number(cut.begin)
            return None if value is None else value.xreplace({_AXES[cut.dim]: _AXES[cut.dim] + begin})
        found = through(node)
        value = self.of(found[0]) if found is not None else None
        if found is None or value is None:
            return None
        match found[1]:
            case Contiguous():
                return value
            case Select(dim, index):
                later = {_AXES[d + 1]: _AXES[d] for d in range(dim, len(_AXES) - 1)}
                return value.xreplace({_AXES[dim]: sympy.Integer(index)}).xreplace(later)
            case Reshape(shape):
                return self._reshaped(found[0], shape)
        return None

    def _reshaped(self, source: Node, after: Sequence[Size]) -> sympy.Expr | None:
        number = self.number_of(source)
        if number is not None:
            self._bags[number][expression(product(after))] = None
            return self._plain(number, after)
        return self.of(source) if len(shape_of(source)) == len(after) else None

    def cast(self, node: Node, source: Node, *_: Any) -> sympy.Expr | None:
        return self.of(source)

    def sum(self, node: Node, source: Node, *dims: Any) -> sympy.Expr | None:
        last = len(shape_of(source)) - 1
        asked = [dim % (last + 1) for dim in dims[0]] if dims and isinstance(dims[0], list | tuple) else [0]
        begin = self._telescoped(source, last) if asked == [last] and len(dims) < 2 else None
        if begin is None:
            return None
        size = expression(shape_of(source)[last])
        return begin.xreplace({_AXES[last]: size}) - begin.xreplace({_AXES[last]: sympy.Integer(0)})

    def cumsum(self, node: Node, source: Node, dim: int = 0, *_: Any) -> sympy.Expr | None:
        last = len(shape_of(source)) - 1
        begin = self._telescoped(source, last) if dim % (last + 1) == last else None
        return None if begin is None else _since_first(begin, last, 1)

    def complete_cumsum(self, node: Node, source: Node) -> sympy.Expr | None:
        """FBGEMM's: with a zero in front."""
        begin = self._telescoped(source, 0) if len(shape_of(source)) == 1 else None
        return None if begin is None else _since_first(begin, 0, 0)

    def diff(self, node: Node, source: Node, times: int = 1, dim: int = -1, *more: Any) -> sympy.Expr | None:
        value, rank = self.of(source), len(shape_of(source))
        if value is None or source in self.lengths or times != 1 or any(part is not None for part in more):
            return None
        axis = _AXES[dim % rank]
        return value.xreplace({axis: axis + 1}) - value

    def subtract(self, node: Node, left: Any, right: Any) -> sympy.Expr | None:
        """A tensor less one of its elements, or less as many."""
        if node.kwargs or not isinstance(left, Node) or not isinstance(right, Node) or tensor_of(left) is None:
            return None
        if tensor_of(right) is None:
            value, other = self.of(left), self.number(expression(right.meta["val"]))
        else:
            if len(shape_of(right)) not in (0, len(shape_of(left))):
                return None
            ones = [d for d, size in enumerate(shape_of(right)) if same(size, 1)]
            value, other = self.of(left), self.of(right)
            other = None if other is None else other.xreplace(dict.fromkeys((_AXES[d] for d in ones), sympy.Integer(0)))
        return None if value is None or other is None else value - other

    def joined(self, node: Node, parts: Any, dim: int = 0) -> sympy.Expr | None:
        """Zeros in front of sums that begin with the first length."""
        last = len(shape_of(node)) - 1
        if len(parts) != 2 or dim % (last + 1) != last or not same(shape_of(parts[0])[last], 1):
            return None
        return self._behind_zero(parts[1], last) if parts[0].target in _ZEROS else None

    def padded(self, node: Node, source: Node, width: Any, value: Any = 0) -> sympy.Expr | None:
        front = list(width) == [1, 0] and value == 0
        return self._behind_zero(source, len(shape_of(source)) - 1) if front else None

    def _behind_zero(self, node: Node, last: int) -> sympy.Expr | None:
        value, axis = self.of(node), _AXES[last]
        value = None if value is None else value.xreplace({axis: axis - 1})
        return value if value is not None and value.xreplace({axis: sympy.Integer(0)}) == 0 else None

    def _telescoped(self, source: Node, axis: int) -> sympy.Expr | None:
        """Before(e), where the elements along an axis are Before(e + 1) - Before(e), one bag after the other."""
        value = self.of(source)
        terms = value.atoms(Before) if value is not None else ()
        for begin in terms:
            number, bag = begin.args
            if value == Before(number, bag + 1) - begin and bag.coeff(_AXES[axis]) == 1:
                return begin
        return None


def _since_first(begin: sympy.Expr, axis: int, more: int) -> sympy.Expr:
    at = _AXES[axis]
    return begin.xreplace({at: at + more}) - begin.xreplace({at: sympy.Integer(0)})


_HANDLERS: dict[str, Callable[..., sympy.Expr | None]] = {
    **{f"aten::{target}": Sums.cast for target in ("to", "_to_copy", "type_as")},
    "aten::sum": Sums.sum,
    "aten::cumsum": Sums.cumsum,
    "aten::diff": Sums.diff,
    "aten::sub": Sums.subtract,
    "aten::cat": Sums.joined,
    "aten::constant_pad_nd": Sums.padded,
    "aten::pad": Sums.padded,
    "fbgemm::asynchronous_complete_cumsum": Sums.complete_cumsum,
}
