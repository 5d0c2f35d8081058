"""Attention over strided operands in PyTorch, any dtype and device: the meaning of a plan, and the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import plan as p
from .plan import Operand, Plan


def view(tensor: Tensor, operand: Operand) -> Tensor:
    """The operand in `tensor`: [factors, positions, channels]; a dim of its own where it does not depend on an axis."""
    sizes = [tensor.shape[axis.dim] if axis.size < 0 else axis.size for axis in operand.axes]
    strides = [tensor.stride(axis.dim) * axis.step if axis.dim >= 0 else 0 for axis in operand.axes]
    start = sum(tensor.stride(dim) * index for dim, index in operand.starts)
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Of views: the result [factors, queries, channels] and the weights [factors, queries, keys]."""
    product = scores(q, k, mask, bias, plan)
    if plan.weighing == p.SILU:
        weights = F.silu(product) / plan.divisor
        return weights @ v, weights
    weights = product.softmax(-1)
    if plan.safe:
        weights = weights.masked_fill((product == -torch.inf).all(-1, keepdim=True), 0)
    return weights @ v, weights


def scores(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, plan: Plan) -> Tensor:
    product = (q * plan.scale) @ k.mT
    if bias is not None:
        product = product + bias
    if plan.masking == p.ADDED:
        assert mask is not None
        return product + mask
    filled = _filled(product, mask, plan)
    return product if filled is None else product.masked_fill(filled, plan.fill)


def unfilled(grad: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
    """No gradient flows to scores that the mask has replaced."""
    filled = _filled(grad, mask, plan)
    return grad if filled is None else grad.masked_fill(filled, 0)


def _filled(scores: Tensor, mask: Tensor | None, plan: Plan) -> Tensor | None:
    if plan.masking == p.CAUSAL:
        return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if plan.masking not in (p.FILL_SET, p.FILL_UNSET):
        return None
    assert mask is not None
    return mask if plan.masking == p.FILL_SET else ~mask


def laid_out(result: Tensor, plan: Plan) -> Tensor:
    """In the plan's order, contiguous."""
    return result.permute(plan.order).contiguous()


def laid_back(result: Tensor, plan: Plan) -> Tensor:
    """The inverse of :func:`laid_out`, without the copy."""
    return result.permute(sorted(range(len(plan.order)), key=plan.order.__getitem__))
