"""fxopt::attention on CUDA, without gradients: one generated kernel, which reads heads by their strides.

For the fields of a row or a short history, where two products in batches and a softmax copy the heads and take a launch
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...pointwise.cuda import pointwise_on_cuda
from ..op import views_of
from ..plan import Plan


def call_on_cuda(plan: Plan, program: str) -> Callable[..., Sequence[Tensor]]:
    """The operator with this plan, for a graph that runs. program: the same as a plan of fxopt::pointwise, whose inputs
    are the views of queries, keys, values and mask, and whose axes are those of the result in memory, then the keys."""
    places = [plan.order.index(number) for number in range(plan.factors + 1)]
    order = [*(sorted(places).index(place) for place in places), plan.factors + 1]

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], words: Sequence[int]) -> Sequence[Tensor]:
        views = [view for view in views_of(q, k, v, mask, plan) if view is not None]
        if views[1].shape[-2] == 0:
            return torch.ops.fxopt.attention(q, k, v, mask, words)  # without keys
        result, *weights = pointwise_on_cuda(views, program)
        return [result, *(each.permute(order).contiguous() for each in weights)]

    return attention
