"""Memory that a kernel for CUDA does not write must not look right.

Eager runs first, and its results are freed: PyTorch's allocator gives the same memory to a kernel of ours, with eager's
values in it. A kernel that left out half of its rows has passed so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph

from fxopt.shape.sizes import tensors_in
from fxopt.torch_internals.symbols import traced_sizes

_MOST_BYTES = 1 << 28  # in all


def leave_nothing(graph: Graph) -> None:
    """Free memory of a GPU of the sizes of our operators' results, as they were captured, holds NaN."""
    held, room = [], _MOST_BYTES
    for value in (value for value in _made_by_us(graph) if value.is_cuda):
        shape = traced_sizes(value.shape, unknown=1)
        room -= math.prod(shape) * value.element_size()
        if room < 0:
            return
        wrong = math.nan if value.is_floating_point() else True if value.dtype is torch.bool else 99
        held.append(torch.full(shape, wrong, dtype=value.dtype, device=value.device))


def _made_by_us(graph: Graph) -> Iterator[Tensor]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "fxopt":
            yield from tensors_in(node)
        elif inner := node.meta.get("function"):
            yield from _made_by_us(inner)
