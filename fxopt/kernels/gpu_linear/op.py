"""fxopt::gpu_linear: activation(x @ weight.T + bias) on CUDA, without gradients, by the fastest of four ways.

Few rows and long dot products keep 16 of 132 multiprocessors busy: cut in 8 parts, a batched product of the parts and
one launch for their sum, the rest, bias and activation. A single output takes a warp a row. ReLU goes into cuBLASLt's
epilogue. H200, microseconds with the ReLU, in TF32 for 256 x 8152 by 1024: 44.6 as linear and relu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cuda_build, cuda_call
from ..operators import Operator, Operators

KERNEL = cuda_build.CudaLibrary(
    "fxopt_gpu_linear",
    source=Path(__file__).with_name("linear.cu"),
    headers=(cuda_call.FLOATS,),
    functions=("fxopt_linear_finish", "fxopt_linear_dot"),
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}
_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
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
        *((name, ctypes.c_int32) for name in ("m", "k", "activation")),
    ]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """What the model wrote."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def gpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]; any dtype. For tensors that record no gradients."""
    M, N = x.shape[0], weight.shape[0]
    side_by_side = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    kernel = cuda_build.loaded(KERNEL) if x.dtype in cuda_call.DTYPES and side_by_side and M else None
    if kernel is not None:
        if N == 1:
            return _one_output(kernel, x, weight, bias, activation)
        if (
            x.dtype is torch.float32
            and FEWEST_ROWS <= M <= MOST_ROWS
            and N >= FEWEST_OUT
            and N % 4 == 0
            and weight.shape[1] >= FEWEST_IN
        ):
            return _in_parts(kernel, x, weight, bias, activation)
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


def _one_output(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    out = x.new_empty(x.shape[0], 1)
    at = 0 if bias is None else bias.data_ptr()
    pointers = x.data_ptr(), weight.data_ptr(), at, out.data_ptr()
    cuda_call.launch(kernel.fxopt_linear_dot, bytes(_Dot(*pointers, x.stride(0), *x.shape, _CODES[activation])), x)
    return out


def _in_parts(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    part = K // PARTS // 8 * 8  # 32 bytes: parts that are not as aligned take 10% longer
    partial = torch.bmm(x.as_strided((PARTS, M, part), (part, K, 1)), weight.as_strided((PARTS, part, N), (part, 1, K)))
    out, skipped = x.new_empty(M, N), PARTS * part * x.itemsize
    finish = _Finish(
        partial.data_ptr(), x.data_ptr() + skipped, weight.data_ptr() + skipped, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), K, K, PARTS, M, N, K - PARTS * part, _CODES[activation],
    )  # fmt: skip
    cuda_call.launch(kernel.fxopt_linear_finish, bytes(finish), x)
    return out


OPERATORS = Operators(
    (Operator("gpu_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor", reference),)
)
load = OPERATORS.load
