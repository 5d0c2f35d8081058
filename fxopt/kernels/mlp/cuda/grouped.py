"""fxopt::gpu_grouped: many small products, each of a vector and a matrix of its own, on CUDA, without gradients.

The bilinear pairs of FiBiNET (Huang et al., arXiv:1905.09433), and whatever else has a matrix a field or a pair. By
PyTorch it is a gather, a batched product, a gather, a product by elements, and a copy into the order of the rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import MOST_GROUPED

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_grouped", "fxopt_grouped")
_MOST_BLOCKS = 2**30  # each computes four rows of a lane or more
_SET_BY_THE_LIBRARY = 0
_Places: TypeAlias = "Sequence[Tensor | None]"  # of_x, of_weight, of_y


def reference(
    x: Tensor, weight: Tensor, y: Tensor | None, of_x: Tensor | None, of_weight: Tensor | None, of_y: Tensor | None
) -> Tensor:
    """What the model wrote."""
    lanes, matrices = _taken(x, 1, of_x), _taken(weight, 0, of_weight)
    products = torch.bmm(lanes.transpose(0, 1), matrices).transpose(0, 1)
    return (products if y is None else products * _taken(y, 1, of_y)).contiguous()


def _taken(tensor: Tensor, dim: int, places: Tensor | None) -> Tensor:
    return tensor if places is None else tensor.index_select(dim, places)


def gpu_grouped(
    x: Tensor, weight: Tensor, y: Tensor | None, of_x: Tensor | None, of_weight: Tensor | None, of_y: Tensor | None
) -> Tensor:
    """out[b, l] = x[b, of_x[l]] @ weight[of_weight[l]], times y[b, of_y[l]] where there is y.

    Args:
        x: [B, F, K]. weight: [G, K, N]. y: [B, H, N].
        of_x, of_weight, of_y: int64 [L]; None: lane l takes entry l. On a GPU, an entry that is not there gives NaN.

    Returns:
        [B, L, N], contiguous.
    """
    places = [None if each is None else each.contiguous() for each in (of_x, of_weight, of_y)]
    fits = cuda_call.alike((x, weight, y)) and _fits(x, weight, y, places)
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if fits else None
    if kernel is None:
        return reference(x, weight, y, *places)
    out = _fake(x, weight, y, *places)
    return cuda_call.filled(kernel.fxopt_grouped, parameters(x, weight, y, places, out), out)


def _fits(x: Tensor, weight: Tensor, y: Tensor | None, places: _Places) -> bool:
    (B, _, K), N, L = x.shape, weight.shape[2], _lanes(weight, places)
    known = all(t is None or (t.dtype == torch.int64 and t.device == x.device) for t in places)
    entries = (x.shape[1], weight.shape[0], L if y is None else y.shape[1])
    lanes = (count if t is None else len(t) for count, t in zip(entries, places, strict=True))
    alike = weight.shape[1] == K and (y is None or (y.shape[0], y.shape[2]) == (B, N)) and set(lanes) == {L}
    return (
        known
        and alike
        and x.dtype == torch.float32
        and 0 < K <= MOST_GROUPED
        and N <= MOST_GROUPED
        and B * L < _MOST_BLOCKS
    )


def parameters(x: Tensor, weight: Tensor, y: Tensor | None, places: _Places, out: Tensor) -> bytes:
    """grouped.cu's Grouped."""
    counts = x.shape[1], weight.shape[0], 0 if y is None else y.shape[1]
    sizes = *counts, *out.shape[:2], *weight.shape[1:], _SET_BY_THE_LIBRARY
    return cuda_call.operands((x, weight, y, out), 4) + struct.pack("<3q8i", *cuda_call.addresses(*places), *sizes)


def _fake(
    x: Tensor, weight: Tensor, y: Tensor | None, of_x: Tensor | None, of_weight: Tensor | None, of_y: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], _lanes(weight, (of_x, of_weight, of_y)), weight.shape[2])


def _lanes(weight: Tensor, places: _Places) -> int:
    return next((each for each in places if each is not None), weight).shape[0]


_INPUTS = "Tensor x, Tensor weight, Tensor? y, Tensor? of_x, Tensor? of_weight, Tensor? of_y"
OPERATORS = Operators((Operator(f"gpu_grouped({_INPUTS}) -> Tensor", reference, _fake, facts=BY_ROWS),), cuda=KERNEL)
