"""fxopt::attention: softmax(q k^T) v for short sequences, over operands that lie in any regular way in memory.

For the fields of a row or a short history, torch's attention kernels spend their time around the arithmetic: 512 heads
of 26 positions, dim 8, take 0.95 ms as two batched products and a softmax, 1.5 ms by scaled_dot_product_attention,
0.43 ms here (one core). Heads are split, stacked and merged by strides; nothing is copied.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import entry, simd
from ..build import BuildError, Library
from . import reference
from .plan import Plan

_HERE = Path(__file__).parent
_TARGET = _HERE.parent / "target_attention"
KERNEL = Library(
    "fxopt_attention",
    sources=tuple(_HERE / f"{name}.cpp" for name in ("isa_avx512", "isa_avx2", "isa_scalar", "cpu")),
    headers=(*sorted(_HERE.glob("*.h")), _TARGET / "multiply.h", _TARGET / "job.h", *simd.HEADERS, *entry.HEADERS),
    cflags=(*simd.CFLAGS, "-Wno-psabi", entry.STABLE_ABI),
)
_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor[] mask, int[] plan"
_loading = threading.Lock()
_library: torch.library.Library | None = None
_past_dispatcher: Callable | None = None
_has_kernel = False


def load() -> None:
    """Defines the operator, once: with the compiled kernel, or in PyTorch where it cannot be compiled."""
    global _library
    with _loading:
        if _library is None:
            _library = _define()
            _load_kernel()


def call_of(plan: Sequence[int]) -> Callable[..., Sequence[Tensor]]:
    """The operator with this plan, for a graph that runs: past the dispatcher where it may."""
    load()
    words = torch.tensor(plan)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], plan: Sequence[int]) -> Sequence[Tensor]:
        if _past_dispatcher is not None and q.dtype is torch.float32:
            results = _past_dispatcher(q, k, v, mask, words)
            if results is not None:
                return results
        return torch.ops.fxopt.attention(q, k, v, mask, plan)

    return attention


def _define() -> torch.library.Library:
    library = torch.library.Library("fxopt", "FRAGMENT")
    library.define(f"attention({_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    library.define(f"attention_kernel({_ARGUMENTS}) -> Tensor[]")
    library.impl("attention", _forward, "CompositeExplicitAutograd")
    torch.library.register_fake("fxopt::attention", _fake, lib=library)
    torch.library.register_autograd("fxopt::attention", _backward, setup_context=_setup_context, lib=library)
    return library


def _load_kernel() -> None:
    global _past_dispatcher, _has_kernel
    try:
        _past_dispatcher = entry.load(KERNEL, "fxopt_attention_run")
        _has_kernel = True
    except (BuildError, OSError) as error:
        warnings.warn(f"fxopt: attention runs in PyTorch, without the compiled kernel: {error}", stacklevel=4)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], plan: list[int]) -> list[Tensor]:
    if _has_kernel and all(x.is_cpu and x.dtype == torch.float32 for x in (q, k, v)):
        return torch.ops.fxopt.attention_kernel(q, k, v, mask, plan)
    decoded = Plan.of(plan)
    result, weights = reference.attention(*_views(q, k, v, mask, decoded), decoded)
    return [reference.laid_out(result, decoded), *([weights.contiguous()] if decoded.weights else [])]


def _views(
    q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Tensor], plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    masked = reference.view(mask[0], plan.mask) if plan.mask else None
    return reference.view(q, plan.query), reference.view(k, plan.key), reference.view(v, plan.value), masked


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
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    """With the weights of the forward where it kept them, else computed again."""
    plan = Plan.of(ctx.plan)
    bases, kept = ctx.saved_tensors[: 3 + ctx.masks], ctx.saved_tensors[3 + ctx.masks :]
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in bases]
    with torch.enable_grad():
        q, k, v, mask = _views(leaves[0], leaves[1], leaves[2], leaves[3:], plan)
    with torch.no_grad():
        weights = kept[0] if kept else reference.attention(q, k, v, mask, plan)[1]
        dv, dweights = torch.zeros_like(v), torch.zeros_like(weights)
        if grads[0] is not None:
            grad = reference.laid_back(grads[0], plan)
            dv, dweights = weights.mT @ grad, grad @ v.mT
        if len(grads) > 1 and grads[1] is not None:
            dweights = dweights + grads[1]
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        if plan.safe:
            dscores = dscores.nan_to_num(0)
        dscores = reference.unfilled(dscores, mask, plan)
        found = [(q, (dscores @ k) * plan.scale), (k, (dscores.mT @ q) * plan.scale), (v, dv)]
    if mask is not None and mask.requires_grad:
        found.append((mask, dscores))
    return *_of_bases(found, leaves, ctx.masks), None


def _of_bases(found: list[tuple[Tensor, Tensor]], leaves: list[Tensor], masks: int) -> tuple:
    """Gradients of views as those of the tensors that they view."""
    outputs = [view for view, _ in found]
    grads = [grad.sum_to_size(view.shape) for view, grad in found]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    given = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, materialize_grads=True))
    ordered = [next(given) if leaf.requires_grad else None for leaf in leaves]
    return *ordered[:3], ordered[3:]
