"""fxopt::k_largest on CUDA by a kernel of its own, without gradients: largest.cu.

torch.topk takes a launch for the k largest numbers of each list with their indices, and one that sorts them.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ..serves import LONGEST_ON_CUDA, MOST

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_k_largest", "fxopt_k_largest")
_MOST_INNER = (1 << 31) - 1


def k_largest_on_cuda(x: Tensor, k: int, placed: bool = False) -> Tensor:
    """The operator, for a graph that runs; x has any strides. In their places they are PyTorch's."""
    served = not placed and cuda_call.alike((x,)) and _fits(x, k)
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if served else None
    if kernel is None:
        return torch.ops.fxopt.k_largest(x, k, placed)
    out = x.new_empty((x.shape[0], k, x.shape[2]))
    return cuda_call.filled(kernel.fxopt_k_largest, parameters(x, out), out)


def parameters(x: Tensor, out: Tensor) -> bytes:
    """largest.cu's Largest."""
    outer, length, inner = x.shape
    return cuda_call.operands((x, out), 2) + struct.pack("<q3i28x", outer * inner, length, inner, out.shape[1])


def _fits(x: Tensor, k: int) -> bool:
    if x.dtype is not torch.float32 or x.dim() != 3:
        return False
    _, length, inner = x.shape
    return 1 <= k <= min(length, MOST) and length <= LONGEST_ON_CUDA and inner <= _MOST_INNER
