"""Tensors of constant content: made once, or once per size, instead of at each call.

A torch.zeros takes 1.1 us, a mask of four operators 5 us and more; finding one that was made before 0.05 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxopt.patterns.constants import constant_of
from fxopt.patterns.core import Match
from fxopt.patterns.sized_constants import KEPT_BYTES, find_sized_constants, is_filled, order_of
from fxopt.rewrites.core import Editor, Rejected, Replacement, Rewrite
from fxopt.rewrites.sizes import computed
from fxopt.shape.expressions import is_size
from fxopt.shape.sizes import Size, expression, static

aten = torch.ops.aten
_KEPT_SIZES = 8  # a server's batch buckets, or full batches and the last one


@dataclass(frozen=True)
class Slot:
    """Stands in a step's arguments for a size (the first numbers) or for the result of an earlier step."""

    number: int


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made from sizes: calls of (target, args, kwargs), each result a slot for those behind it."""

    steps: tuple[tuple[Callable[..., Any], tuple, dict[str, Any]], ...]

    def __call__(self, *sizes: Size) -> Tensor:
        values: list[Any] = list(sizes)

        def filled(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, Slot) else argument

        for target, args, kwargs in self.steps:
            values.append(target(*map_aggregate(args, filled), **map_aggregate(kwargs, filled)))
        return values[-1]


def recipe_of(calls: tuple[Node, ...], sizes: tuple[sympy.Expr, ...]) -> Recipe:
    """The calls as data: nothing of it belongs to the graph."""
    slots: dict[Node, Any] = {}
    steps: list[tuple[Callable[..., Any], tuple, dict[str, Any]]] = []
    number = {size: Slot(index) for index, size in enumerate(sizes)}

    def stand_in(argument: Any) -> Any:
        if isinstance(argument, Node):
            return size_of(argument.meta["val"]) if is_size(argument) else slots[argument]
        return argument

    def size_of(size: Size) -> Any:
        known = static(size)
        return number[expression(size)] if known is None else known

    def step(target: Any, *args: Any, **kwargs: Any) -> Slot:
        steps.append((target, args, kwargs))
        return Slot(len(sizes) + len(steps) - 1)

    for node in calls:
        if node.op == "get_attr":
            slots[node] = getattr(node.graph.owning_module, str(node.target))
        elif is_filled(node):
            slots[node] = _filled(node, size_of, step)
        else:
            slots[node] = step(node.target, *map_aggregate(node.args, stand_in), **map_aggregate(node.kwargs, stand_in))  # type: ignore[arg-type]
    return Recipe(tuple(steps))


def _filled(node: Node, size_of: Callable[[Size], Any], step: Callable[..., Slot]) -> Slot:
    """zeros_like and its kin, with the strides that they take over."""
    value = node.meta["val"]
    order = order_of(value)
    assert order is not None
    shape = [size_of(value.shape[dim]) for dim in order]
    made = step(aten.full.default, shape, constant_of(node), dtype=value.dtype, device=value.device)
    in_order = order == sorted(order)
    return made if in_order else step(aten.permute.default, made, [order.index(dim) for dim in range(len(order))])


def made(recipe: Recipe, *sizes: int) -> Tensor:
    """A tensor that any later call may read, whatever mode this one is in."""
    with torch.inference_mode(False), torch.no_grad():
        return recipe(*sizes)


def kept_by_size(recipe: Recipe) -> Callable[..., Tensor]:
    """`recipe` that remembers the last few sizes. Reading takes no lock."""
    kept: dict[tuple[int, ...], Tensor] = {}
    lock = threading.Lock()

    def constant(*sizes: int) -> Tensor:
        try:
            return kept[sizes]
        except KeyError:
            return keep(sizes, made(recipe, *sizes))

    def keep(sizes: tuple[int, ...], tensor: Tensor) -> Tensor:
        room = KEPT_BYTES - tensor.untyped_storage().nbytes()
        if room < 0:
            return tensor
        with lock:
            while kept and (len(kept) >= _KEPT_SIZES or _bytes(kept) > room):
                del kept[next(iter(kept))]
            return kept.setdefault(sizes, tensor)

    return constant


def _bytes(kept: dict[tuple[int, ...], Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def replace_constant(editor: Editor, match: Match) -> Replacement:
    sizes: tuple[sympy.Expr, ...] = match.bound["sizes"]
    recipe = recipe_of(match.bound["calls"], sizes)
    words = " > ".join(node.target._opname for node in match.bound["calls"] if hasattr(node.target, "_opname"))
    if not sizes:
        constant = _constant(editor, made(recipe), match.anchor)
        return Replacement({match.anchor: constant}, f"{words}: a constant", "depends on nothing")
    nodes = computed(editor, match.bound["sources"], reuse=True)
    arguments = [nodes.of(size) for size in sizes]

    def sized_constant(*sizes: Size) -> Tensor:
        return recipe(*sizes)

    call = editor.call(sized_constant, *arguments)
    call.meta["bound"] = kept_by_size(recipe)
    return Replacement(
        {match.anchor: call}, f"{words}: made once per size", f"depends on {', '.join(map(str, sizes))} alone"
    )


def _constant(editor: Editor, tensor: Tensor, anchor: Node) -> Node:
    claimed = anchor.meta["val"]
    if tensor.device != claimed.device:
        raise Rejected(f"expected a tensor on {claimed.device}, found {tensor.device}")
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # other streams will read it
    node = editor.constant("sized", tensor)
    node.meta["literal"] = True
    return node


REWRITE = Rewrite(
    "sized_constants",
    find_sized_constants,
    replace_constant,
    why="after the columns: they read off their offsets and defaults how zeros, ones and arange are made",
)
