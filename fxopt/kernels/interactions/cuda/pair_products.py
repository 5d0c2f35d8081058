"""fxopt::gpu_pairs: z[:, i] * z[:, j], or its sums over the vectors, on CUDA, without gradients.

The pairs of a product-based network (Qu et al., arXiv:1611.00144) and of an attentional FM (Xiao et al.,
arXiv:1708.04617). By PyTorch the vectors of either side are written out first.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import MOST_PAIRS, multiplies

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_pairs", "fxopt_pairs")


def reference(z: Tensor, i: Tensor, j: Tensor, dots: bool) -> Tensor:
    """What the model wrote."""
    products = z[:, i] * z[:, j]
    return products.sum(2) if dots else products.contiguous()


def gpu_pairs(z: Tensor, i: Tensor, j: Tensor, dots: bool) -> Tensor:
    """z [B, F, D], i and j int64 [P] -> [B, P, D], with `dots` its sum over D, [B, P]; contiguous.

    Negative indices count from the end. On a GPU, an index outside [-F, F) gives NaN.
    """
    kernel = cuda_build.loaded(KERNEL, z.get_device()) if _fits(z, i, j) else None
    if kernel is None:
        return reference(z, i, j, dots)
    out = _fake(z, i, j, dots)
    return cuda_call.filled(kernel.fxopt_pairs, parameters(z, i, j, dots, out), out)


def _fake(z: Tensor, i: Tensor, j: Tensor, dots: bool) -> Tensor:
    B, _, D = z.shape
    return z.new_empty(B, i.shape[0]) if dots else z.new_empty(B, i.shape[0], D)


def parameters(z: Tensor, i: Tensor, j: Tensor, dots: bool, out: Tensor) -> bytes:
    """pair_products.cu's Pairs."""
    sizes = *z.shape, i.shape[0], dots
    return cuda_call.operands((z,), 1) + struct.pack("<3q5i16x", *cuda_call.addresses(i, j, out), *sizes)


def _fits(z: Tensor, i: Tensor, j: Tensor) -> bool:
    listed = all(t.dtype == torch.int64 and t.device == z.device and t.is_contiguous() for t in (i, j))
    alike = i.dim() == 1 and i.shape == j.shape and i.shape[0] <= MOST_PAIRS
    close = z.stride(2) == 1 or z.shape[2] == 1
    fits = z.dtype == torch.float32 and multiplies(z.shape[1], z.shape[2])
    return listed and alike and close and fits and cuda_call.alike((z,))


_SCHEMA = "gpu_pairs(Tensor z, Tensor i, Tensor j, bool dots) -> Tensor"
OPERATORS = Operators((Operator(_SCHEMA, reference, _fake, facts=BY_ROWS),), cuda=KERNEL)
