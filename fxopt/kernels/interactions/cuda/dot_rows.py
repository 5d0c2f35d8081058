"""fxopt::gpu_dots: cat([before, z[i] . z[j]], 1) for vectors z on CUDA, without gradients."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import fits

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_dots", "fxopt_dots")


def reference(z: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int) -> Tensor:
    """What the model wrote, with zeros behind it."""
    found = torch.cat([before, torch.bmm(z, z.transpose(1, 2))[:, i, j]], 1)
    return F.pad(found, (0, width - found.shape[1]))


def gpu_dots(z: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int) -> Tensor:
    """z [B, F, D], before [B, W], i and j int64 [P] -> [B, width], behind W + P zeros.

    An index outside [-F, F) gives NaN.
    """
    kernel = cuda_build.loaded(KERNEL, z.get_device()) if _fits(z, before, i, j, width) else None
    if kernel is None:
        return reference(z, before, i, j, width)
    out = z.new_empty(z.shape[0], width)
    return cuda_call.filled(kernel.fxopt_dots, parameters(z, before, i, j, out), out)


def _fake(z: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int) -> Tensor:
    return z.new_empty(z.shape[0], width)


def parameters(z: Tensor, before: Tensor, i: Tensor, j: Tensor, out: Tensor) -> bytes:
    """dot_rows.cu's Dots."""
    pointers, width = cuda_call.addresses(before, i, j, out), before.shape[1]
    return struct.pack("<5q6iq16x", *pointers, width, *z.shape, width, i.shape[0], out.shape[1], z.data_ptr())


def _fits(z: Tensor, before: Tensor, i: Tensor, j: Tensor, width: int) -> bool:
    tensors = (z, before, i, j)
    alike = all(t.is_contiguous() and t.device == z.device for t in tensors) and i.shape == j.shape and i.dim() == 1
    small = fits(z.dtype, z.shape[1], z.shape[2])
    aligned = z.data_ptr() % 16 == 0 and before.dtype == z.dtype and i.dtype == j.dtype == torch.int64
    alike = alike and width >= before.shape[1] + i.shape[0]
    return alike and small and aligned and z.is_cuda


_SCHEMA = "gpu_dots(Tensor z, Tensor before, Tensor i, Tensor j, int width) -> Tensor"
OPERATORS = Operators((Operator(_SCHEMA, reference, _fake, facts=BY_ROWS),), cuda=KERNEL)
