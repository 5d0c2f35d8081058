"""fxopt::gpu_few_rows: linear layers one behind the other for at most 16 rows on CUDA, in one persistent launch.

At batch 1 a tower is the reading of its weights, and each launch of its own begins and ends with an idle memory. Here
all blocks stay through all layers, with a barrier between two, and fetch weights as far ahead as shared memory holds
them, also those of the next layer, because they depend on none before it. The idea is that of "MonoNN: Enabling a New
Monolithic Optimization Space for Neural Network Inference Tasks on Modern GPU-Centric Architectures" (Zhuang et al.,
OSDI 2024). Sums are fp32 in an order that sizes and device decide.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import MOST_LAYERS, MOST_ROWS, VECTOR
from . import linear

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_few_rows", "fxopt_few_rows")
_NAMES = list(linear.CODES)
_HEAD, _LAYER = struct.Struct("<3q4i"), struct.Struct("<2q4i")  # few_rows.cu's Request, up to its layers, and Layer


def reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[int]
) -> Tensor:
    """What the model wrote, a layer at a time."""
    for weight, bias, code in zip(weights, biases, activations, strict=True):
        x = linear.reference(x, weight, bias, _NAMES[code])
    return x


def gpu_few_rows(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[int]
) -> Tensor:
    """x [M, K], weights [N, K] each of which takes what the one before gives -> [M, N of the last].

    `activations` are linear.ACTIVATIONS by number. More rows, and what the kernel does not know, go layer by layer. For
    tensors that record no gradients.
    """
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if _serves(x, weights, biases) else None
    if kernel is None:
        return linear.gpu_linears(x, weights, biases, [_NAMES[code] for code in activations])
    M, widest = x.shape[0], max(map(len, weights))
    widest += -widest % VECTOR
    out, between = x.new_empty(M, len(weights[-1])), x.new_empty(2, M, widest)
    layers = [
        _LAYER.pack(*cuda_call.addresses(weight, bias), *weight.shape, code, 0)
        for weight, bias, code in zip(weights, biases, activations, strict=True)
    ]
    request = _HEAD.pack(*cuda_call.addresses(x, out, between), M, len(layers), widest, 0) + b"".join(layers)
    whole = request.ljust(_HEAD.size + MOST_LAYERS * _LAYER.size, b"\0")
    return cuda_call.filled(kernel.fxopt_few_rows, whole, out)


def _serves(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    if x.dtype is not torch.float32 or not 0 < x.shape[0] <= MOST_ROWS or not 0 < len(weights) <= MOST_LAYERS:
        return False
    inputs = (x.shape[1], *map(len, weights))  # of each layer, and what the last one gives
    return (
        cuda_call.alike((x, *weights, *biases))
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 and t.numel() for t in (x, *weights))
        and all(width % VECTOR == 0 for width in inputs[:-1])
        and all(w.shape == (N, K) for w, (K, N) in zip(weights, itertools.pairwise(inputs), strict=True))
        and all(
            b is None or (b.shape == w.shape[:1] and b.is_contiguous()) for w, b in zip(weights, biases, strict=True)
        )
    )


_SCHEMA = "gpu_few_rows(Tensor x, Tensor[] weights, Tensor?[] biases, int[] activations) -> Tensor"
OPERATORS = Operators((Operator(_SCHEMA, reference, facts=BY_ROWS),), cuda=KERNEL)
