"""Sizes as facts: a size is an int or a SymInt; `same`, `divides` and `at_most` hold for every input or are False.

None of them adds a guard, and a False may just mean "not known".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from fxopt.torch_internals.symbols import expression, static, statically_known_true, traced_sizes

Size = int | torch.SymInt


def tensor_of(value: object) -> torch.Tensor | None:
    """The FakeTensor that a node stands for; None where it is not one tensor, and for what is no node."""
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_tensor(value: object) -> TypeGuard[Node]:
    """Whether an argument is a node that stands for one tensor."""
    return tensor_of(value) is not None


def is_float32(value: object, device: str = "", rank: int | None = None) -> TypeGuard[Node]:
    """Whether it is a tensor of float32, on this kind of device and with so many dims where that is asked."""
    found = tensor_of(value)
    if found is None or found.dtype != torch.float32:
        return False
    return device in ("", found.device.type) and rank in (None, found.dim())


def tensors_in(node: Node) -> list[torch.Tensor]:
    """The FakeTensors of a node's value, which may be several, or none."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def shape_of(node: Node) -> tuple[Size, ...]:
    """The sizes of a tensor node."""
    return tuple(node.meta["val"].shape)


def dim_of_size(tensors: Iterable[Node], size: Size) -> tuple[Node, int] | None:
    """The first of these tensors that has this size, and where."""
    dims = ((node, dim) for node in tensors for dim, own in enumerate(shape_of(node)) if same(own, size))
    return next(dims, None)


def inferred(sizes: Iterable[Size]) -> list[int] | None:
    """These sizes for a view, -1 for the one that depends on the inputs; None where there are more, or one is 0."""
    known = [static(size) for size in sizes]
    if known.count(None) > 1 or 0 in known:
        return None
    return [-1 if size is None else size for size in known]


def depend_alike(left: Size, right: Size) -> bool:
    """Whether a symbol of the trace is in both: where one size changes, so may the other."""
    return bool(expression(left).free_symbols & expression(right).free_symbols)


def same(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for every input this graph accepts."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if left is right or expression(left) == expression(right):
        return True
    traced = set(traced_sizes((left, right), -1))  # two sizes that differed are not asked about: torch takes 0.2 ms
    return (len(traced) == 1 or -1 in traced) and statically_known_true(left == right)


def divides(divisor: int, size: Size) -> bool:
    """Whether a size is a multiple of `divisor` > 0 for every input this graph accepts."""
    return divisor == 1 or statically_known_true(size % divisor == 0)


def at_most(left: Size, right: Size) -> bool:
    """Whether `left` is never larger than `right`, for every input this graph accepts."""
    return left is right or statically_known_true(left <= right)


def same_shape(left: Node, right: Node) -> bool:
    """Whether two tensor nodes have equal sizes for every input this graph accepts."""
    return same_sizes(shape_of(left), shape_of(right))


def same_sizes(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether two shapes are equal for every input this graph accepts."""
    return len(left) == len(right) and all(map(same, left, right))


def same_count(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether two shapes have equally many elements for every input this graph accepts."""
    (known, symbols), (other, others) = map(_factors, (left, right))
    return (known == other and symbols == others) or same(product(left), product(right))


def _factors(sizes: Sequence[Size]) -> tuple[int, list[sympy.Expr]]:
    """The static sizes multiplied, and the others: compared without a term for the product, which takes 60 us."""
    known = [static(size) for size in sizes]
    symbols = [expression(size) for size, number in zip(sizes, known, strict=True) if number is None]
    return math.prod(number for number in known if number is not None), sorted(symbols, key=str)


def product(sizes: Iterable[Size]) -> Size:
    known, unknown = 1, None
    for size in sizes:  # a multiplication of a SymInt by 1 costs 50 us
        if isinstance(size, int):
            known *= size
        else:
            unknown = size if unknown is None else unknown * size
    if unknown is None:
        return known
    return unknown if known == 1 else unknown * known
