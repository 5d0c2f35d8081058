"""fxopt::pair_sum: the sum of the products of all pairs of vectors, the second order of a factorization machine.

Each vector times the sum of those before it (Rendle, ICDM 2010, gives the O(F) form); summed over lanes it is FM's
scalar, else the bi-interaction of NFM (He and Chua, arXiv:1708.05027). Weights, one a vector, are IFM's and DIFM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import gradients
from ..operators import BY_ROWS, Operator, Operators
from ..words import bits_of
from .library import KERNEL, PAIR_SUM


def pair_sum(x: Tensor, weights: Tensor | None, scale: float, total: bool) -> Tensor:
    """scale * sum over i < j of (w_i x_i) * (w_j x_j). The kernel's own definition.

    Args:
        x: [B, F, D].
        weights: [B, F] or [B, F, 1].
        total: sum over D too.

    Returns:
        [B, D], or [B, 1] where `total`.
    """
    if weights is not None:
        x = x * (weights if weights.dim() == 3 else weights.unsqueeze(2))
    pairs = (x.cumsum(1) - x).mul(x).sum(1) * scale
    return pairs.sum(1, keepdim=True) if total else pairs


def call_of(scale: float, total: bool) -> Callable[..., Tensor]:
    """The operator with these constants, past the dispatcher where it can be."""
    return OPERATORS.call_of("pair_sum", torch.tensor([bits_of(scale), int(total)], device="cpu"))


def _fake(x: Tensor, weights: Tensor | None, scale: float, total: bool) -> Tensor:
    return x.new_empty((x.shape[0], 1 if total else x.shape[2]))


def _fake_backward(grad: Tensor, x: Tensor, weights: Tensor | None, scale: float, total: bool) -> list[Tensor]:
    given = [x] if weights is None else [x, weights]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


def _gradients(grad: Tensor, x: Tensor, weights: Tensor | None, scale: float, total: bool) -> list[Tensor]:
    """The gradients of x and of the weights, if there are any."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weights) if tensor is not None]
    with torch.enable_grad():
        result = pair_sum(leaves[0], leaves[1] if len(leaves) == 2 else None, scale, total)
    return [gradient.contiguous() for gradient in torch.autograd.grad(result, leaves, grad)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, ctx.scale, ctx.total = inputs
    ctx.save_for_backward(x, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    if gradients.by_definition([grad]) or not (grad.is_cpu and OPERATORS.compiled()):
        again = gradients.again(lambda x, w: [pair_sum(x, w, ctx.scale, ctx.total)], ctx.saved_tensors, [grad])
        return *again, None, None
    found = torch.ops.fxopt.pair_sum_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.total)
    return found[0], found[1] if len(found) == 2 else None, None, None


OPERATORS = Operators(
    (
        Operator(PAIR_SUM[0], pair_sum, _fake, _backward, _setup_context, facts=BY_ROWS),
        Operator(PAIR_SUM[1], _gradients, _fake_backward),
    ),
    KERNEL,
)
