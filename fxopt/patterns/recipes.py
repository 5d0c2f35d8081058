"""How a tensor of constant content is made, as data that belongs to no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxopt.normalize.keys import frozen
from fxopt.patterns.constants import constant_of
from fxopt.shape.expressions import is_size
from fxopt.shape.sizes import Size, expression, same, static

aten = torch.ops.aten

# Of their first argument they read sizes, dtype and device only.
_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


@dataclass(frozen=True)
class Slot:
    """Stands in a step's arguments for a size (the first numbers) or for the result of an earlier step."""

    number: int


@dataclass(frozen=True)
class Recipe:
    """Calls of (target, args, kwargs); each result is a slot for those behind it.

    sizes: the expressions that a call of the recipe takes the values of; names: of the operators, for a reader.
    """

    sizes: tuple[sympy.Expr, ...]
    steps: tuple[tuple[Callable[..., Any], tuple, dict[str, Any]], ...]
    names: tuple[str, ...]

    def __call__(self, *sizes: Size) -> Tensor:
        values: list[Any] = list(sizes)

        def filled(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, Slot) else argument

        for target, args, kwargs in self.steps:
            values.append(target(*map_aggregate(args, filled), **map_aggregate(kwargs, filled)))
        return values[-1]

    @property
    def key(self) -> Any:
        """Equal for recipes that make the same."""
        return self.sizes, frozen(self.steps)


class Writer:
    """Writes a recipe down, node by node in graph order."""

    def __init__(self, sizes: Iterable[sympy.Expr]) -> None:
        self._sizes = tuple(sizes)
        self._number = {size: Slot(index) for index, size in enumerate(self._sizes)}
        self._slots: dict[Node, Any] = {}
        self._steps: list[tuple[Callable[..., Any], tuple, dict[str, Any]]] = []
        self._names: list[str] = []

    def write(self, nodes: Iterable[Node]) -> Recipe:
        for node in nodes:
            self._slots[node] = self._written(node)
        return Recipe(self._sizes, tuple(self._steps), tuple(self._names))

    def _written(self, node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(node.graph.owning_module, str(node.target))
        if isinstance(node.target, torch._ops.OpOverload):
            self._names.append(node.target.overloadpacket.__name__)
        if is_filled(node):
            return self._filled(node)
        args: Any = map_aggregate(node.args, self._stand_in)
        kwargs: Any = map_aggregate(node.kwargs, self._stand_in)
        return self._step(node.target, *args, **kwargs)

    def _filled(self, node: Node) -> Slot:
        """zeros_like and its kin, with the strides that they take over."""
        value = node.meta["val"]
        order = order_of(value)
        assert order is not None
        shape = [self._size(value.shape[dim]) for dim in order]
        made = self._step(aten.full.default, shape, constant_of(node), dtype=value.dtype, device=value.device)
        if order == sorted(order):
            return made
        return self._step(aten.permute.default, made, [order.index(dim) for dim in range(len(order))])

    def _step(self, target: Any, *args: Any, **kwargs: Any) -> Slot:
        self._steps.append((target, args, kwargs))
        return Slot(len(self._sizes) + len(self._steps) - 1)

    def _stand_in(self, argument: Any) -> Any:
        if not isinstance(argument, Node):
            return argument
        return self._size(argument.meta["val"]) if is_size(argument) else self._slots[argument]

    def _size(self, size: Size) -> Any:
        known = static(size)
        return self._number[expression(size)] if known is None else known


def is_filled(node: Node) -> bool:
    """Whether a node holds one number in the sizes of another tensor."""
    return node.target in _LIKE and constant_of(node) is not None and order_of(node.meta["val"]) is not None


def order_of(tensor: Tensor) -> list[int] | None:
    """The dims of a dense tensor, outermost first; None where its memory has gaps or overlaps."""
    ones = [dim for dim, size in enumerate(tensor.shape) if static(size) == 1]
    left = [dim for dim in range(tensor.dim()) if dim not in ones]
    order: list[int] = []
    while left:
        expected = tensor.stride(order[0]) * tensor.shape[order[0]] if order else 1
        dim = next((dim for dim in reversed(left) if same(tensor.stride(dim), expected)), None)
        if dim is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
    return ones + order
