"""What goes into a softmax: products of queries and keys, scaled and masked in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.kernels.attention.plan import ADDED, FILL_SET, FILL_UNSET, NO_MASK
from fxopt.patterns.attention.strided import Strided, strided
from fxopt.patterns.constants import constant_of
from fxopt.shape.sizes import same, shape_of, tensor_of

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.bmm.default)


@dataclass
class Product:
    """Scores: queries [..., L, d] and keys [..., S, d], each as the product reads it."""

    query: Strided
    key: Strided
    scale: float = 1.0
    masking: int = NO_MASK
    fill: float = 0.0
    mask: Node | None = None


def scores_of(node: Node) -> Product | None:
    """Products of queries and keys, scaled and masked in any order."""
    if tensor_of(node) is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in PRODUCTS:
        left, right = node.args
        return Product(strided(left), _swapped(strided(right)))  # type: ignore[arg-type]
    if node.target is aten.baddbmm.default:
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
            return None
        mask, left, right = node.args
        return replace(Product(strided(left), _swapped(strided(right))), masking=ADDED, mask=mask)  # type: ignore[arg-type]
    if node.target is aten.einsum.default:
        return _einsum(node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        left, right = node.args[:2]
        number = constant_of(right)
        inner = scores_of(left) if number and isinstance(left, Node) else None
        if inner is None or inner.masking == ADDED:
            return None
        factor = float(number) if "mul" in str(node.target) else 1 / float(number)  # type: ignore[arg-type]
        return replace(inner, scale=inner.scale * factor, fill=inner.fill * factor)
    return _masked(node)


def _masked(node: Node) -> Product | None:
    if node.target is aten.where.self:
        mask, one, two = node.args
        kept, other, masking = (one, two, FILL_UNSET) if constant_of(two) is not None else (two, one, FILL_SET)
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        kept, mask, other = node.args
        masking = FILL_SET
    elif node.target is aten.add.Tensor and not node.kwargs:
        kept, mask = node.args
        masking, other = ADDED, 0.0
        if isinstance(mask, Node) and isinstance(kept, Node) and scores_of(kept) is None:
            kept, mask = mask, kept
    else:
        return None
    fill = constant_of(other)
    if fill is None or not isinstance(kept, Node) or not isinstance(mask, Node) or tensor_of(mask) is None:
        return None
    inner = scores_of(kept)
    dtype = torch.bool if masking != ADDED else node.meta["val"].dtype
    if inner is None or inner.masking != NO_MASK or mask.meta["val"].dtype != dtype:
        return None
    if len(shape_of(kept)) != len(shape_of(node)) or not all(map(same, shape_of(kept), shape_of(node))):
        return None
    return replace(inner, masking=masking, fill=float(fill), mask=mask)


def _einsum(node: Node) -> Product | None:
    """Any letters: batch letters in all three, one of queries, one of keys, one that is summed, in matrix order."""
    letters = letters_of(node)
    if letters is None:
        return None
    left, right, out = letters
    if len(out) < 2:
        return None
    batch, L, S = out[:-2], out[-2], out[-1]
    summed = [letter for letter in left if letter in right and letter not in out]
    if len(summed) != 1:
        return None
    first, second = (strided(operand) for operand in node.args[1])  # type: ignore[union-attr, arg-type]
    if L in right:
        (left, first), (right, second) = (right, second), (left, first)
    order = [*batch, L, *summed], [*batch, S, *summed]
    if sorted(order[0]) != sorted(left) or sorted(order[1]) != sorted(right):
        return None
    return Product(ordered(first, left, order[0]), ordered(second, right, order[1]))


def letters_of(node: Node) -> tuple[str, str, str] | None:
    equation, operands = node.args[:2]
    inputs, arrow, out = str(equation).replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or "." in inputs or len(names) != 2 or len(operands) != 2:  # type: ignore[arg-type]
        return None
    if any(len(set(name)) < len(name) for name in (*names, out)):
        return None
    return names[0], names[1], out


def ordered(operand: Strided, names: str, order: list[str]) -> Strided:
    return replace(operand, axes=tuple(operand.axes[names.index(letter)] for letter in order))


def _swapped(operand: Strided) -> Strided:
    return replace(operand, axes=(*operand.axes[:-2], operand.axes[-1], operand.axes[-2]))
