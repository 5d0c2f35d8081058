"""fxopt::target_attention: the scores of a query against the positions of a sequence, and their weighted sum.

Deep Interest Network's attention unit (Zhou et al., KDD'18) without its concatenation: W [q, k, q - k, q * k] is
(Wq + Wd) q + (Wk - Wd + Wp diag(q)) k, so a row has a bias and a weight of its own, half the multiplications, and
nothing of size [B, T, 4 D] exists. All layers run over a few positions at a time, in the first-level cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import gradients
from ..by_rows.many import at_a_time
from ..operators import BY_ROWS, Operator, Operators, cpu_library
from . import cuda, reference
from .plan import Plan

_ARGUMENTS = "Tensor[] rows, Tensor[] positions, Tensor[] masks, Tensor[] params, int[] plan"
_KERNEL = f"target_attention_kernel({_ARGUMENTS}) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "job.h", "tile.h", (_KERNEL,))


def call_of(plan: Sequence[int]) -> Callable[..., Tensor]:
    """The operator with this plan, for a graph that runs: past the dispatcher where it may."""
    words, past_dispatcher = torch.tensor(plan, device="cpu"), OPERATORS.past_dispatcher("target_attention")

    def target_attention(
        rows: list[Tensor], positions: list[Tensor], masks: list[Tensor], params: list[Tensor], plan: Sequence[int]
    ) -> Tensor:
        if positions[0].dtype is torch.float32:
            results = past_dispatcher(rows, positions, masks, params, words)
            if results is not None:
                return results[0]
        return OPERATORS.recorded("target_attention", rows, positions, masks, params, plan)

    return target_attention


def _forward(
    rows: list[Tensor], positions: list[Tensor], masks: list[Tensor], params: list[Tensor], plan: list[int]
) -> Tensor:
    everything = (*rows, *positions, *params)
    if all(x.is_cpu and x.dtype == torch.float32 for x in everything) and OPERATORS.compiled():
        with torch.no_grad():
            return torch.ops.fxopt.target_attention_kernel(rows, positions, masks, params, plan)[0]
    decoded = Plan.of(plan)
    chunks = _chunks(rows, positions, masks, params, decoded)
    return torch.cat([reference.target_attention(*chunk, params, decoded) for chunk in chunks])


def _chunks(
    rows: Sequence[Tensor], positions: Sequence[Tensor], masks: Sequence[Tensor], params: Sequence[Tensor], plan: Plan
) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Rows, positions and masks of as many rows at a time as fit the cache; one empty chunk of an empty batch."""
    B, T = positions[0].shape[:2]
    size = at_a_time(B, reference.rows_at_once(T, params, plan))
    for start in range(0, max(1, B), size):
        chunk = [[x[start : start + size] for x in tensors] for tensors in (rows, positions, masks)]
        yield chunk[0], chunk[1], chunk[2]


def _fake(
    rows: list[Tensor], positions: list[Tensor], masks: list[Tensor], params: list[Tensor], plan: list[int]
) -> Tensor:
    B, T = positions[0].shape[:2]
    values = Plan.of(plan).values
    return positions[0].new_empty((B, T if values < 0 else positions[values].shape[2]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.plan = inputs
    ctx.counts = [len(part) for part in tensors]
    ctx.save_for_backward(*(x for part in tensors for x in part))


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """Through the reference computed again, a few rows at a time, so that its intermediates stay in the cache."""
    saved = iter(ctx.saved_tensors)
    rows, positions, masks, params = ([next(saved) for _ in range(count)] for count in ctx.counts)
    plan = Plan.of(ctx.plan)
    if gradients.by_definition([grad]):
        return *_again(grad, (rows, positions, masks, params), plan), None
    weights = _leaves(params)
    sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in params]
    pieces: list[Sequence[Tensor]] = []
    start = 0
    for chunk in _chunks(rows, positions, masks, params, plan):
        q, k, m = map(_leaves, chunk)
        with torch.enable_grad():
            output = reference.target_attention(q, k, m, weights, plan)
        leaves = [x for x in (*q, *k, *m) if x.requires_grad]
        piece = grad[start : start + output.shape[0]]
        found = torch.autograd.grad(output, [*leaves, *weights], piece, allow_unused=True, materialize_grads=True)
        pieces.append(found[: len(leaves)])
        sums = [total + part for total, part in zip(sums, found[len(leaves) :], strict=True)]
        start += output.shape[0]
    by_row = iter(torch.cat(parts) for parts in zip(*pieces, strict=True))
    grads = [[next(by_row) if x.is_floating_point() else None for x in part] for part in (rows, positions, masks)]
    return *grads, sums, None


def _again(grad: Tensor, parts: Sequence[list[Tensor]], plan: Plan) -> list[list[Tensor | None]]:
    """All rows at once: differentiable, or for many gradients."""
    tensors = [x for part in parts for x in part]
    ends = list(itertools.accumulate(map(len, parts)))
    slices = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]

    def defined(*given: Any) -> list[Tensor]:
        rows, positions, masks, params = (given[where] for where in slices)
        return [reference.target_attention(rows, positions, masks, params, plan)]

    found = gradients.again(defined, tensors, [grad], [x.is_floating_point() for x in tensors])
    return [found[where] for where in slices]


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]


OPERATORS = Operators(
    (
        Operator(
            f"target_attention({_ARGUMENTS}) -> Tensor", _forward, _fake, _backward, _setup_context, facts=BY_ROWS
        ),
        Operator(_KERNEL, fake=lambda *arguments: [_fake(*arguments)]),
    ),
    KERNEL,
    cuda.KERNEL,
)
