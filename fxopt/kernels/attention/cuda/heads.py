"""fxopt::attention on CUDA by a kernel of its own, without gradients: heads.cu.

It reads heads by their strides, and keys and values once. A generated program reads them for each query again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from .. import plan as p
from ..op import views_of
from ..plan import MOST_FACTORS, Plan

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_heads", "fxopt_heads")
MOST_CHANNELS = 64  # 8 threads of 8 channels
_MOST_COUNTED = (1 << 31) - (1 << 20)
_APART = 1 << 26  # elements from one key of a mask to the next: fewer, as tile.cuh says
_SET_BY_THE_LIBRARY = (0,) * 4  # how it divides the work


def serves(plan: Plan, dtypes: Sequence[torch.dtype], channels: Sequence[object]) -> bool:
    """Whether the kernel computes attention of operands of these dtypes; channels: of keys and of values."""
    masks = [torch.float32 if plan.masking == p.ADDED else torch.bool] if plan.mask else []
    known = list(dtypes) == [*[torch.float32] * 3, *masks, *([torch.float32] if plan.bias else [])]
    few = all(isinstance(size, int) and 0 < size <= MOST_CHANNELS for size in channels)
    return known and few and plan.factors <= MOST_FACTORS


def call_of(plan: Plan) -> Callable[..., Sequence[Tensor]]:
    """The operator with this plan, which the kernel serves, for a graph that runs."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], words: Sequence[int]) -> Sequence[Tensor]:
        views = views_of(q, k, v, mask, plan)
        kernel = cuda_build.loaded(KERNEL, q.get_device()) if cuda_call.alike((q, k, v)) and _fits(*views) else None
        if kernel is None:
            return torch.ops.fxopt.attention(q, k, v, mask, words)
        sizes = _sizes(*views[:3])
        out = q.new_empty([sizes[axis] for axis in plan.order])
        weights = [q.new_empty((*sizes[:-1], views[1].shape[-2]))] if plan.weights else []
        if out.numel():
            cuda_call.launch(kernel.fxopt_heads, parameters(views, out, plan, *weights), q)
        return [out, *weights]

    return attention


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Of the result: factors, queries, channels."""
    return [*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], v.shape[-1]]


def _fits(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> bool:
    heads_and_queries = math.prod(_sizes(q, k, v)[:-1])
    counted = 0 < k.shape[-2] <= _MOST_COUNTED and heads_and_queries <= _MOST_COUNTED
    return counted and q.dtype is torch.float32 and all(mask is None or _is_read(mask, q) for mask in masks)


def _is_read(mask: Tensor, q: Tensor) -> bool:
    """Whether the kernel can read a mask beside these queries."""
    recorded = torch.is_grad_enabled() and mask.requires_grad
    return mask.device == q.device and not recorded and mask.stride(-1) < _APART


def parameters(views: Sequence[Tensor | None], out: Tensor, plan: Plan, weights: Tensor | None = None) -> bytes:
    """heads.cu's Heads. views: queries, keys, values, mask and bias, as :func:`..op.views_of` gives them."""
    q, k, v, mask, bias = views
    assert q is not None and k is not None and v is not None
    result = out.permute(sorted(range(out.dim()), key=plan.order.__getitem__))
    *factors, queries, of_values = result.shape
    missing = MOST_FACTORS - len(factors)
    words: list[int] = []
    for view in (q, k, v, mask, bias, result):
        if view is None:
            words += (0,) * (MOST_FACTORS + 3)
            continue
        strides = [stride if size != 1 else 0 for size, stride in zip(view.shape, view.stride(), strict=True)]
        words += (view.data_ptr(), *(0,) * missing, *strides)
    words.append(weights.data_ptr() if weights is not None else 0)
    sizes = (*(1,) * missing, *factors, math.prod(factors), queries, k.shape[-2], q.shape[-1], of_values)
    numbers = (*sizes, *_SET_BY_THE_LIBRARY, plan.masking, plan.safe, plan.weighing == p.SILU)
    floats = plan.fill, plan.scale, plan.divisor
    return struct.pack(f"<{len(words)}q{len(numbers)}i3f", *words, *numbers, *floats) + bytes(4)
