"""fxopt::gpu_linear: activation(x @ weight.T + bias) on CUDA, without gradients, by the fastest of four ways.

Few rows and long dot products keep 16 of 132 multiprocessors busy: cut in 8 parts, a batched product of the parts and
one launch for their sum, the rest, bias and activation. A single output takes a warp a row. ReLU goes into cuBLASLt's
epilogue. H200, microseconds with the ReLU, in TF32 for 256 x 8152 by 1024: 44.6 as linear and relu.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..build import BuildError
from ..cuda_build import CudaLibrary, arch_of
from ..cuda_build import build as build_cuda
from ..operators import Operator, Operators

KERNEL = CudaLibrary("fxopt_gpu_linear", source=Path(__file__).with_name("linear.cu"))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}
_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PARTS = 8
FEWEST_IN, FEWEST_OUT = 4096, 256  # below, cuBLAS is as fast
FEWEST_ROWS, MOST_ROWS = 32, 512
ALIGNED = 8  # halves: 16 bytes
ODD_IN = 128  # rows of halves that do not start at 16 bytes: 2048 x 415 by 512 takes 21 us, padded first 8


class _Finish(ctypes.Structure):
    """linear.cu's Finish."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "weight_stride")),
        *((name, ctypes.c_int32) for name in ("parts", "m", "n", "tail", "activation")),
    ]


class _Dot(ctypes.Structure):
    """linear.cu's Dot."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("m", "k", "activation", "dtype")),
    ]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """What the model wrote."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def gpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]; any dtype. For tensors that record no gradients."""
    M, N = x.shape[0], weight.shape[0]
    side_by_side = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if x.dtype in _DTYPES and side_by_side and M and _kernel() is not None:
        if N == 1:
            return _one_output(x, weight, bias, activation)
        if (
            x.dtype is torch.float32
            and FEWEST_ROWS <= M <= MOST_ROWS
            and N >= FEWEST_OUT
            and N % 4 == 0
            and weight.shape[1] >= FEWEST_IN
        ):
            return _in_parts(x, weight, bias, activation)
    if (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % ALIGNED
        and x.shape[1] >= ODD_IN
        and M >= FEWEST_ROWS
    ):
        x, weight = (F.pad(t, (0, -t.shape[1] % ALIGNED)) for t in (x, weight))
    if activation == "relu" and bias is not None:
        return torch._addmm_activation(bias, x, weight.t())
    out = F.linear(x, weight, bias)
    return out.relu_() if activation == "relu" else out.sigmoid_() if activation == "sigmoid" else out


def _one_output(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    out = x.new_empty(x.shape[0], 1)
    at = 0 if bias is None else bias.data_ptr()
    numbers = (x.stride(0), *x.shape, _CODES[activation], _DTYPES.index(x.dtype))
    dot = _Dot(x.data_ptr(), weight.data_ptr(), at, out.data_ptr(), *numbers)
    with torch.cuda.device(x.device):
        _raise(_kernel().fxopt_linear_dot(ctypes.byref(dot), _stream(x)))  # type: ignore[union-attr]
    return out


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    part = K // PARTS // 8 * 8  # 32 bytes: parts that are not as aligned take 10% longer
    partial = torch.bmm(x.as_strided((PARTS, M, part), (part, K, 1)), weight.as_strided((PARTS, part, N), (part, 1, K)))
    out, skipped = x.new_empty(M, N), PARTS * part * x.itemsize
    finish = _Finish(
        partial.data_ptr(), x.data_ptr() + skipped, weight.data_ptr() + skipped, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), K, K, PARTS, M, N, K - PARTS * part, _CODES[activation],
    )  # fmt: skip
    with torch.cuda.device(x.device):
        _raise(_kernel().fxopt_linear_finish(ctypes.byref(finish), _stream(x)))  # type: ignore[union-attr]
    return out


def _stream(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)


def _raise(text: bytes | None) -> None:
    if text:
        raise RuntimeError(text.decode())


@functools.cache
def _kernel() -> ctypes.CDLL | None:
    """None where it cannot be compiled: cuBLAS then serves everything."""
    try:
        library = ctypes.CDLL(str(build_cuda(KERNEL, arch_of(torch.cuda.get_device_capability()))))
    except (BuildError, OSError):
        return None
    library.fxopt_linear_finish.restype = library.fxopt_linear_dot.restype = ctypes.c_char_p
    library.fxopt_linear_finish.argtypes = library.fxopt_linear_dot.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


OPERATORS = Operators(
    (Operator("gpu_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor", reference),)
)
load = OPERATORS.load
