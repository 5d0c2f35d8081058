"""Small products in batches as sums of products: on CUDA they join what stands around them in one kernel."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.patterns.pointwise.axes import Axes, Dims, Mismatch
from fxopt.patterns.pointwise.rule import Call, Rule, tensors
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
_LONGEST = 64  # numbers in a sum, and
_WIDEST = 4096  # sums in a product; above that tensor cores and tiles pay. Not tuned: every use is timed.


def is_batched(node: Node) -> bool:
    """Whether it is a product of as many matrices on both sides."""
    if node.target not in (aten.bmm.default, aten.matmul.default):
        return False
    left, right = (len(shape_of(operand)) for operand in tensors(node).values())
    return left == right > 2


def _shape(node: Node, axes: Axes, dims: dict[int, Dims]) -> Dims:
    """[..., M, K] times [..., K, N]."""
    left, right = dims[0], dims[1]
    sizes = [static(size) for size in (*shape_of(tensors(node)[0])[-2:], shape_of(node)[-1])]
    if any(size is None for size in sizes) or left[0] is None or right[0] is None:
        raise Mismatch
    M, K, N = (size or 0 for size in sizes)
    if K > _LONGEST or M * N > _WIDEST:
        raise Mismatch
    axes.join(left[-1], right[-2])
    batch = (axes.join(a, b) for a, b in zip(left[:-2], right[:-2], strict=True))
    return (*batch, left[-2], right[-1])


def _steps(call: Call) -> int:
    summed = call.dims[0][-1]
    product = call.do("mul", call.values[0], call.values[1])
    return product if summed is None else call.program.reduce("sum", product, [summed])


BATCHED = Rule(_shape, _steps)
