"""fxopt::pair_sum: the sum of the products of all pairs of vectors, the second order of a factorization machine.

Each vector times the sum of those before it (Rendle, ICDM 2010, gives the O(F) form); summed over lanes it is FM's
scalar, else the bi-interaction of NFM (He and Chua, arXiv:1708.05027). Weights, one a vector, are IFM's and DIFM's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import library

SCHEMAS = (
    "pair_sum(Tensor x, Tensor? weights, float scale, bool total) -> Tensor",
    "pair_sum_backward(Tensor grad, Tensor x, Tensor? weights, float scale, bool total) -> Tensor[]",
)


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
    plan = torch.tensor([struct.unpack("i", struct.pack("f", scale))[0], int(total)])

    def fxopt_pair_sum(x: Tensor, weights: Tensor | None, scale: float, total: bool) -> Tensor:
        outputs = library.kernel("pair_sum")(x, weights, plan)
        if outputs is not None:
            return outputs[0]
        if torch.is_grad_enabled():
            return _Recorded.apply(x, weights, scale, total, plan)
        return torch.ops.fxopt.pair_sum(x, weights, scale, total)

    return fxopt_pair_sum


class _Recorded(torch.autograd.Function):
    """The operator with its gradients, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, scale: float, total: bool, plan: Tensor) -> Tensor:
        _setup_context(ctx, (x, weights, scale, total), plan)
        ctx.plan = plan
        outputs = library.kernel("pair_sum")(x, weights, plan)
        return torch.ops.fxopt.pair_sum(x, weights, scale, total) if outputs is None else outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        found = library.kernel("pair_sum_backward")(grad, *ctx.saved_tensors, ctx.plan)
        if found is None:
            return *_backward(ctx, grad), None
        return found[0], found[1] if len(found) == 2 else None, None, None, None


def define(lib: torch.library.Library) -> None:
    lib.impl("pair_sum", pair_sum, "CompositeExplicitAutograd")
    lib.impl("pair_sum_backward", _gradients, "CompositeExplicitAutograd")
    torch.library.register_fake("fxopt::pair_sum", _fake, lib=lib)
    torch.library.register_fake("fxopt::pair_sum_backward", _fake_backward, lib=lib)
    torch.library.register_autograd("fxopt::pair_sum", _backward, setup_context=_setup_context, lib=lib)
    torch.library.register_autograd("fxopt::pair_sum_backward", _second, setup_context=_setup_second, lib=lib)


def _fake(x: Tensor, weights: Tensor | None, scale: float, total: bool) -> Tensor:
    return x.new_empty((x.shape[0], 1 if total else x.shape[2]))


def _fake_backward(grad: Tensor, x: Tensor, weights: Tensor | None, scale: float, total: bool) -> list[Tensor]:
    given = [x] if weights is None else [x, weights]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


def _gradients(
    grad: Tensor, x: Tensor, weights: Tensor | None, scale: float, total: bool, create_graph: bool = False
) -> list[Tensor]:
    """The gradients of x and of the weights, if there are any."""
    given = [x] if weights is None else [x, weights]
    leaves = given if create_graph else [tensor.detach().requires_grad_() for tensor in given]
    with torch.enable_grad():
        result = pair_sum(leaves[0], leaves[1] if len(leaves) == 2 else None, scale, total)
    found = torch.autograd.grad(result, leaves, grad, create_graph=create_graph)
    return [gradient.contiguous() for gradient in found]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, ctx.scale, ctx.total = inputs
    ctx.save_for_backward(x, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    found = torch.ops.fxopt.pair_sum_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.total)
    return found[0], found[1] if len(found) == 2 else None, None, None


def _setup_second(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad, x, weights, ctx.scale, ctx.total = inputs
    ctx.save_for_backward(grad, x, weights)


def _second(ctx: Any, grads: list[Tensor]) -> tuple:
    """The gradient of _gradients, through its definition in PyTorch."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
    grad, x, weights = leaves
    with torch.enable_grad():
        first = _gradients(grad, x, weights, ctx.scale, ctx.total, create_graph=True)  # type: ignore[arg-type]
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = list(torch.autograd.grad(first, wanted, grads, allow_unused=True))
    return found[0], found[1], found[2] if len(found) == 3 else None, None, None
