"""What goes into a softmax, or a gate: products of queries and keys, scaled and masked in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.attention.plan import ADDED, FILL_SET, FILL_UNSET, NO_MASK
from fxopt.patterns.attention.strided import Strided, strided
from fxopt.patterns.constants import constant_of
from fxopt.shape.calls import FILLS, WHERES
from fxopt.shape.sizes import is_tensor, same_shape, tensor_of
from fxopt.shape.spelled import Letters, spelled

aten = torch.ops.aten
SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.einsum.default)


@dataclass
class Product:
    """Scores: queries [..., L, d] and keys [..., S, d], each as the product reads it."""

    query: Strided
    key: Strided
    scale: float = 1.0
    masking: int = NO_MASK
    fill: float = 0.0
    mask: Node | None = None
    bias: Node | None = None  # added before the mask fills


def scores_of(node: Node) -> Product | None:
    """Products of queries and keys, scaled and masked in any order."""
    if tensor_of(node) is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in PRODUCTS or node.target is aten.baddbmm.default:
        return _product(node)
    if node.target in SCALINGS:
        left, right = node.args[:2]
        number = constant_of(right)
        inner = scores_of(left) if number and isinstance(left, Node) else None
        if inner is None or inner.masking == ADDED or inner.bias is not None:
            return None
        factor = float(number) if "mul" in str(node.target) else 1 / float(number)  # type: ignore[arg-type]
        return replace(inner, scale=inner.scale * factor, fill=inner.fill * factor)
    return _masked(node)


def _masked(node: Node) -> Product | None:
    if node.target in WHERES:
        mask, one, two = node.args
        kept, other, masking = (one, two, FILL_UNSET) if constant_of(two) is not None else (two, one, FILL_SET)
    elif node.target in FILLS:
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
    if fill is None or not isinstance(kept, Node) or not is_tensor(mask):
        return None
    inner = scores_of(kept)
    dtype = torch.bool if masking != ADDED else node.meta["val"].dtype
    if inner is None or mask.meta["val"].dtype != dtype or not same_shape(kept, node):
        return None
    if inner.masking == ADDED and masking != ADDED:
        inner = replace(inner, masking=NO_MASK, mask=None, bias=inner.mask)
    return replace(inner, masking=masking, fill=float(fill), mask=mask) if inner.masking == NO_MASK else None


def _product(node: Node) -> Product | None:
    """Any letters: batch letters in all three, one of queries, one of keys, one that is summed, in matrix order."""
    call = spelled(node)
    if call is None or len(call.operands) != 2 or len(call.out) < 2:
        return None
    (one, left), (other, right) = call.operands
    *batch, L, S = call.out
    summed = [letter for letter in left if letter in right and letter not in call.out]
    if L in right:
        (one, left), (other, right) = (other, right), (one, left)
    query, key = ordered(one, left, [*batch, L, *summed]), ordered(other, right, [*batch, S, *summed])
    if query is None or key is None or len(summed) != 1:
        return None
    return Product(query, key) if call.bias is None else Product(query, key, masking=ADDED, mask=call.bias[0])


def ordered(node: Node, letters: Letters, order: Sequence[Any]) -> Strided | None:
    """A tensor whose axes have these letters, with its axes in this order; None where they are others."""
    if {*letters} != {*order} or len(letters) != len(order):
        return None
    ways = [
        replace(found, axes=tuple(found.axes[letters.index(letter)] for letter in order))
        for found in (strided(node), Strided.of(node))  # [B, 26, 2 * D] as [2 * B, 26, D] is regular by itself alone
    ]
    return next((way for way in ways if all(len(axis) <= 1 for axis in way.axes[-2:])), ways[0])
