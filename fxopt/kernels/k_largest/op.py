"""fxopt::k_largest: the k largest numbers along a dim, sorted or in their places; many short lists at once.

torch.topk gathers each list and sorts it with its indices: 8.9 ms for the k-max poolings of CCPM (Liu et al., CIKM
2015) at batch 256, 16384 lists of 26 and of 13 numbers, where this takes 0.4 ms. The indices are found by a
topk when the gradient asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..operators import BY_ROWS, Operator, Operators, cpu_library
from .cuda import largest

_SCHEMA = "k_largest(Tensor x, int k, bool placed) -> Tensor"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "select.h", (_SCHEMA,))


def k_largest(x: Tensor, k: int, placed: bool) -> Tensor:
    """topk(x, k, 1).values, for x [N, L, M]; `placed`: in the order that they have in x. The kernel's own definition;
    1 <= k <= 64 there."""
    return x.gather(1, _indices(x, k, placed)) if placed else torch.topk(x, k, 1).values.contiguous()


def _indices(x: Tensor, k: int, placed: bool) -> Tensor:
    found = torch.topk(x, k, 1).indices
    return found.sort(1).values if placed else found


def call_of(k: int, placed: bool = False) -> Callable[[Tensor, int, bool], Tensor]:
    """The operator for one k, past the dispatcher where it can be."""
    return OPERATORS.call_of("k_largest", torch.tensor([k, placed], device="cpu"))


def _fake(x: Tensor, k: int, placed: bool) -> Tensor:
    return x.new_empty((x.shape[0], k, x.shape[2]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ctx.k, ctx.placed = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return grad.new_zeros(x.shape).scatter(1, _indices(x, ctx.k, ctx.placed), grad), None, None


OPERATORS = Operators(
    (Operator(_SCHEMA, k_largest, _fake, _backward, _setup_context, facts=BY_ROWS),),
    KERNEL,
    cuda=largest.KERNEL,
)
