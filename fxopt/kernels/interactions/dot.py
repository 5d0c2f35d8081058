"""fxopt::dot_interaction: dot products of pairs of vectors, in one row with what stands beside them.

Each batch row's Gram matrix lives in the cache only; the vectors are read where they are. The interaction of DLRM
(Naumov et al., arXiv:1906.00091) and of product networks (Qu et al., arXiv:1611.00144).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import gradients
from ..operators import BY_ROWS, Operator, Operators
from .library import DOTS, KERNEL


def dot_interaction(
    vectors: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor], i: Tensor, j: Tensor
) -> Tensor:
    """cat([*before, z[i] . z[j], *after], 1), where z is cat(vectors, 1). The kernel's own definition.

    Args:
        vectors: [B, F, D] or [B, D] each.
        before, after: [B, W] each.
        i, j: int64 [P], -F <= index < F.

    Returns:
        [B, W + P + W].
    """
    z = torch.cat([x if x.dim() == 3 else x.unsqueeze(1) for x in vectors], 1)
    return torch.cat([*before, torch.bmm(z, z.transpose(1, 2))[:, i, j], *after], 1)


def _fake(vectors: list[Tensor], before: list[Tensor], after: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    width = sum(beside.shape[1] for beside in (*before, *after)) + i.shape[0]
    return vectors[0].new_empty((vectors[0].shape[0], width))


def _fake_backward(grad: Tensor, i: Tensor, j: Tensor, vectors: list[Tensor], at: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in vectors]


def _gradients(grad: Tensor, i: Tensor, j: Tensor, vectors: list[Tensor], at: int) -> list[Tensor]:
    """The gradients of the vectors; that of the pairs stands at column `at` of `grad`."""
    leaves = [x.detach().requires_grad_() for x in vectors]
    with torch.enable_grad():
        result = dot_interaction(leaves, [], [], i, j)
    found = torch.autograd.grad(result, leaves, grad[:, at : at + i.shape[0]])
    return [gradient.contiguous() for gradient in found]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    vectors, before, after, i, j = inputs
    ctx.save_for_backward(i, j, *vectors)
    ctx.n_vectors = len(vectors)
    ctx.before, ctx.after = ([beside.shape[1] for beside in part] for part in (before, after))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    i, j, *vectors = ctx.saved_tensors
    needs_vectors = any(ctx.needs_input_grad[0])
    pieces = list(grad.split([*ctx.before, i.shape[0], *ctx.after], 1))
    of_dots, before, after = pieces[len(ctx.before)], pieces[: len(ctx.before)], pieces[len(ctx.before) + 1 :]
    found: list[Tensor | None] = [None] * len(vectors)
    if needs_vectors and (gradients.by_definition([grad]) or not (grad.is_cpu and OPERATORS.compiled())):
        found = gradients.again(lambda *z: [dot_interaction(z, [], [], i, j)], vectors, [of_dots])
    elif needs_vectors:
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        found = _call_backward(grad, i, j, vectors, sum(ctx.before))
    return found, before, after, None, None


def _call_backward(grad: Tensor, i: Tensor, j: Tensor, vectors: list[Tensor], at: int) -> list[Tensor | None]:
    outputs = OPERATORS.past_dispatcher("dot_interaction_backward")(
        grad, i, j, vectors, torch.tensor([at], device="cpu")
    )
    if outputs is not None:
        return outputs
    return torch.ops.fxopt.dot_interaction_backward(grad, i, j, vectors, at)


OPERATORS = Operators(
    (
        Operator(DOTS[0], dot_interaction, _fake, _backward, _setup_context, facts=BY_ROWS),
        Operator(DOTS[1], _gradients, _fake_backward),
    ),
    KERNEL,
)
