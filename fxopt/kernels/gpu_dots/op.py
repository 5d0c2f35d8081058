"""fxopt::gpu_dots: cat([before, z[i] . z[j]], 1) for half-precision vectors z on CUDA, without gradients."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..build import BuildError
from ..cuda_build import CudaLibrary, arch_of
from ..cuda_build import build as build_cuda
from ..operators import Operator, Operators

_HERE = Path(__file__).parent
KERNEL = CudaLibrary("fxopt_gpu_dots", source=_HERE / "dots.cu", headers=(_HERE / "mma.cuh",))
MOST_VECTORS, MOST_DIM = 32, 128


class _Dots(ctypes.Structure):
    """dots.cu's Dots."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("vectors", "before", "i", "j", "out")),
        *((name, ctypes.c_int32) for name in ("samples", "fields", "dim", "width", "pairs", "unused")),
    ]


def reference(z: Tensor, before: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """What the model wrote."""
    return torch.cat([before, torch.bmm(z, z.transpose(1, 2))[:, i, j]], 1)


def gpu_dots(z: Tensor, before: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """z [B, F, D], before [B, W], i and j int64 [P] -> [B, W + P]. An index outside [-F, F) gives NaN."""
    kernel = _kernel() if _fits(z, before, i, j) else None
    if kernel is None:
        return reference(z, before, i, j)
    (B, F, D), W, P = z.shape, before.shape[1], i.shape[0]
    out = z.new_empty(B, W + P)
    pointers = (t.data_ptr() for t in (z, before, i, j, out))
    with torch.cuda.device(z.device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        text = kernel.fxopt_dots(ctypes.byref(_Dots(*pointers, B, F, D, W, P)), z.dtype is torch.bfloat16, stream)
    if text:
        raise RuntimeError(text.decode())
    return out


def _fits(z: Tensor, before: Tensor, i: Tensor, j: Tensor) -> bool:
    tensors = (z, before, i, j)
    alike = all(t.is_contiguous() and t.device == z.device for t in tensors) and i.shape == j.shape and i.dim() == 1
    small = z.shape[1] <= MOST_VECTORS and z.shape[2] <= MOST_DIM and z.shape[2] % 16 == 0 and z.shape[2] > 0
    aligned = z.data_ptr() % 16 == 0 and before.dtype == z.dtype and i.dtype == j.dtype == torch.int64
    return alike and small and aligned and z.is_cuda and z.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def _kernel() -> ctypes.CDLL | None:
    """None where it cannot be compiled."""
    try:
        library = ctypes.CDLL(str(build_cuda(KERNEL, arch_of(torch.cuda.get_device_capability()))))
    except (BuildError, OSError):
        return None
    library.fxopt_dots.restype = ctypes.c_char_p
    library.fxopt_dots.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    return library


OPERATORS = Operators((Operator("gpu_dots(Tensor z, Tensor before, Tensor i, Tensor j) -> Tensor", reference),))
load = OPERATORS.load
