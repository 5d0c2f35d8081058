"""fxopt::gpu_cross: x0 * (x @ weight.T + scale) + bias + x on CUDA, without gradients.

A layer of the Deep & Cross Network (Wang et al., arXiv:1708.05123): a product with a vector, one by rows, two sums; or
of its second version (Wang et al., arXiv:2008.13535), whose weight is a matrix.
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from . import linear, sliced

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_cross", "fxopt_cross")


def reference(x0: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """What the model wrote."""
    product = x0 * F.linear(x, weight, scale)
    return (product if bias is None else product + bias) + x


def gpu_cross(x0: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x0, x [M, K], weight [1, K], scale [1], bias of K numbers -> [M, K]; or weight [K, K], scale [K] and no bias."""
    if len(weight) != 1 and bias is None:
        return _by_matrix(x0, x, weight, scale)
    fits = cuda_call.alike((x0, x, weight, scale, bias)) and _fits(x0, x, weight, scale, bias)
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if fits else None
    if kernel is None:
        return reference(x0, x, weight, scale, bias)
    out = x.new_empty(x.shape)
    return cuda_call.filled(kernel.fxopt_cross, parameters(x0, x, weight, scale, bias, out), out)


def _by_matrix(x0: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    shapes = x.dim() == 2 and x0.shape == x.shape and weight.shape == (x.shape[1],) * 2
    dense = scale is None or (scale.shape == weight.shape[:1] and scale.is_contiguous())
    fits = shapes and dense and cuda_call.alike((x0, x, weight, scale)) and sliced.fits(x, weight, x0)
    kernel = cuda_build.loaded(linear.KERNEL, x.get_device()) if fits else None
    if kernel is None:
        return torch.addcmul(x, x0, linear.gpu_linear(x, weight, scale, ""))
    return sliced.launch(kernel, x, weight, scale, linear.CODES[""], x0, x)


def _fits(x0: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> bool:
    K = x.shape[-1]
    vectors = weight.shape == (1, K) and (bias is None or bias.numel() == K) and (scale is None or scale.numel() == 1)
    return vectors and x.dim() == 2 and x0.shape == x.shape and K > 0


def parameters(x0: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor) -> bytes:
    """cross.cu's Cross."""
    vectors = (None if tensor is None else tensor.reshape(-1) for tensor in (weight, scale, bias))
    return cuda_call.operands((x0, x, *vectors, out), 6) + struct.pack("<2i", *x.shape)


OPERATORS = Operators(
    (
        Operator(
            "gpu_cross(Tensor x0, Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor",
            reference,
            lambda x0, x, *vectors: x.new_empty(x.shape),
            facts=BY_ROWS,
        ),
    ),
    cuda=KERNEL,
)
