"""fxopt::attention: softmax(q k^T) v or silu(q k^T) v of short sequences, over operands that lie regularly in memory.

For the fields of a row or a short history, torch's attention kernels spend their time around the arithmetic: 512 heads
of 26 positions, dim 8, take 0.95 ms as two batched products and a softmax, 1.5 ms by scaled_dot_product_attention,
0.43 ms here (one core). Heads are split, stacked and merged by strides; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxopt.facts import Facts
from fxopt.torch_internals.operators import softmax_backward

from .. import gradients
from ..operators import Operator, Operators, cpu_library
from . import reference
from .plan import SILU, Plan

aten = torch.ops.aten

_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor[] mask, int[] plan) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "job.h", "heads.h", (f"attention_kernel{_SCHEMA}",))


def call_of(plan: Sequence[int]) -> Callable[..., Sequence[Tensor]]:
    """The operator with this plan, for a graph that runs: past the dispatcher where it may."""
    words, past_dispatcher = torch.tensor(plan, device="cpu"), OPERATORS.past_dispatcher("attention")

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], plan: Sequence[int]) -> Sequence[Tensor]:
        results = past_dispatcher(q, k, v, mask, words) if q.dtype is torch.float32 else None
        return OPERATORS.recorded("attention", q, k, v, mask, plan) if results is None else results

    return attention


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], plan: list[int]) -> list[Tensor]:
    if all(x.is_cpu and x.dtype == torch.float32 for x in (q, k, v)) and OPERATORS.compiled():
        return torch.ops.fxopt.attention_kernel(q, k, v, mask, plan)
    return _defined(Plan.of(plan), q, k, v, *mask)


def _defined(plan: Plan, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> list[Tensor]:
    result, weights = reference.attention(*views_of(q, k, v, mask, plan), plan)
    return [reference.laid_out(result, plan), *([weights.contiguous()] if plan.weights else [])]


def views_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Tensor], plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, keys, values, mask and bias as the plan reads them: [factors, positions, channels]."""
    masked = reference.view(mask[0], plan.mask) if plan.mask else None
    bias = reference.view(mask[-1], plan.bias) if plan.bias else None
    return reference.view(q, plan.query), reference.view(k, plan.key), reference.view(v, plan.value), masked, bias


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], plan: list[int]) -> list[Tensor]:
    decoded = Plan.of(plan)
    query, key, value = (
        reference.view(x, operand) for x, operand in ((q, decoded.query), (k, decoded.key), (v, decoded.value))
    )
    factors = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    sizes = [*factors, query.shape[-2], value.shape[-1]]
    result = q.new_empty([sizes[axis] for axis in decoded.order])
    return [result, *([q.new_empty((*factors, query.shape[-2], key.shape[-2]))] if decoded.weights else [])]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, mask, ctx.plan = inputs
    ctx.save_for_backward(q, k, v, *mask, *output[1:])
    ctx.masks = len(mask)
    of_weights = [0, 1, *range(3, 3 + len(mask))]
    gradients.mark(ctx, (q, k, v, *mask), output, [range(3 + len(mask)), of_weights][: len(output)])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    """With the weights of the forward where it kept them, else computed again."""
    plan, saved = Plan.of(ctx.plan), ctx.saved_tensors
    bases, kept = saved[: 3 + ctx.masks], saved[3 + ctx.masks :]
    if gradients.by_definition(grads):
        again = gradients.again(partial(_defined, plan), bases, grads, [x.is_floating_point() for x in bases])
        return *again[:3], again[3:], None
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in bases]
    with torch.enable_grad():
        q, k, v, mask, bias = views_of(leaves[0], leaves[1], leaves[2], leaves[3:], plan)
    with torch.no_grad():
        weights = kept[0] if kept else reference.attention(q, k, v, mask, bias, plan)[1]
        dv, dweights = torch.zeros_like(v), torch.zeros_like(weights)
        if grads[0] is not None:
            grad = reference.laid_back(grads[0], plan)
            dv, dweights = weights.mT @ grad, grad @ v.mT
        if len(grads) > 1 and grads[1] is not None:
            dweights = dweights + grads[1]
        if plan.weighing == SILU:
            dscores = aten.silu_backward(dweights / plan.divisor, reference.scores(q, k, mask, bias, plan))
        else:
            dscores = softmax_backward(dweights, weights, -1, weights.dtype)
        if not plan.safe:  # scaled_dot_product_attention adds its masks
            dscores = reference.unfilled(dscores, mask, plan)
        found = [(q, (dscores @ k) * plan.scale), (k, (dscores.mT @ q) * plan.scale), (v, dv)]
    found += [(added, dscores) for added in (mask, bias) if added is not None and added.requires_grad]
    return *_of_bases(found, leaves), None


def _of_bases(found: list[tuple[Tensor, Tensor]], leaves: list[Tensor]) -> tuple:
    """Gradients of views as those of the tensors that they view."""
    outputs = [view for view, _ in found]
    grads = [grad.sum_to_size(view.shape) for view, grad in found]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    given = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, materialize_grads=True))
    ordered = [next(given) if leaf.requires_grad else None for leaf in leaves]
    return *ordered[:3], ordered[3:]


OPERATORS = Operators(
    (
        Operator(f"attention{_SCHEMA}", _forward, _fake, _backward, _setup_context, facts=Facts(rows="axes")),
        Operator(f"attention_kernel{_SCHEMA}", fake=_fake),
    ),
    KERNEL,
)
