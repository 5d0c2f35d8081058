"""fxopt::gpu_linear: activation(x @ weight.T + bias) on CUDA, without gradients, by the fastest of five ways.

Few outputs and long dot products keep 16 of 132 multiprocessors busy: cut in 8 parts, a batched product of them and one
launch for their sum, the rest, bias and activation. Short dot products take a launch of our own, which reads rows as
they lie. A single output, or a single row, takes a warp or a block a dot product. Some hundred inputs of few rows or
outputs are cut among the warps of a block. Else cuBLAS, with ReLU in cuBLASLt's epilogue. H200, microseconds with the
ReLU, in TF32 for 256 x 8152 by 1024: 44.6 as linear and relu, 23.8 in parts (the product alone in 4, 6, 8, 12 and 16
parts: 22.8, 21.5, 19.6, 29.2 and 24.0).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.torch_internals.operators import addmm_activation

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from . import sliced
from .ways import ALIGNED, HALVES, is_long, is_odd, is_row, is_short

KERNEL = cuda_build.beside(
    __file__,
    "fxopt_gpu_linear",
    "fxopt_linear_short",
    "fxopt_linear_finish",
    "fxopt_linear_last",
    "fxopt_linear_dots",
    "fxopt_linear_pad",
    "fxopt_linear_sliced",
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}
CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
PARTS = 8
STEP = 8  # inputs, 32 bytes: parts that are not as aligned take 10% longer
MOST_COUNTED = 2**30  # rows: the kernels count in 32 bits
_Layer: TypeAlias = "tuple[Tensor, Tensor | None, str]"  # weight, bias, activation


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """What the model wrote."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def gpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]; any dtype. For tensors that record no gradients."""
    (M, K), N = x.shape, weight.shape[0]
    side_by_side = x.stride(1) == weight.stride(1) == 1 and (
        bias is None or (bias.shape == (N,) and bias.is_contiguous())
    )
    known = x.dtype in cuda_call.DTYPES and side_by_side and 0 < M < MOST_COUNTED
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if known else None
    if kernel is not None:
        if is_short(x.dtype, M, N, K):
            return _short(kernel, x, weight, bias, activation)
        if N == 1 or is_row(M, N, K):
            return _dots(kernel, x, weight, bias, activation)
        if sliced.fits(x, weight):
            return sliced.launch(kernel, x, weight, bias, CODES[activation])
        if is_long(x.dtype, M, N, K) and x.is_contiguous() and weight.is_contiguous():
            return _in_parts(kernel, x, (weight, bias, activation))
    if is_odd(x.dtype, M, K):
        x, weight = (gpu_padded(t, K + -K % ALIGNED) for t in (x, weight))
    if activation == "relu" and bias is not None and K:  # of no inputs torch's on CUDA is the bias, without ReLU
        return addmm_activation(bias, x, weight.t())
    out = F.linear(x, weight, bias)
    return out.relu_() if activation == "relu" else out.sigmoid_() if activation == "sigmoid" else out


def _short(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    # fp32 2048 x 13 by 128 2.6 us, tall 2.4, by 32 2.0 and 2.2; bf16 16384 x 13 by 128 4.5 and 4.0, by 32 2.4 and 2.9
    tall = out.numel() >= (2**20 if x.dtype in HALVES else 3 * 2**16)
    return cuda_call.filled(kernel.fxopt_linear_short, short(x, weight, bias, out, activation, tall=tall), out)


def short(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: str,
    partial: Tensor | None = None,
    tall: bool = False,
) -> bytes:
    """short.cuh's Short."""
    words = *cuda_call.addresses(x, weight, bias, partial, out), x.stride(0), weight.stride(0)
    parts = 0 if partial is None else len(partial)
    return struct.pack("<7q6i", *words, x.shape[0], weight.shape[0], x.shape[1], CODES[activation], parts, tall)


def _dots(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    rows, vector = (x, weight) if weight.shape[0] == 1 else (weight, x)
    return cuda_call.filled(kernel.fxopt_linear_dots, dots(rows, vector, bias, out, activation), out)


def dots(rows: Tensor, vector: Tensor, bias: Tensor | None, out: Tensor, activation: str) -> bytes:
    """dots.cuh's Dots."""
    words = *cuda_call.addresses(rows, vector, bias, out), rows.stride(0), bias is not None and len(bias) > 1
    return struct.pack("<6q3i4x", *words, *rows.shape, CODES[activation])


def gpu_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
    """Layers, each of which takes what the one before gives, by `gpu_linear`.

    A single output behind a layer in parts is made in the launch that adds these up: 2.4 us where two take 4.1 (H200,
    256 x 128).
    """
    layers = list(zip(weights, biases, activations, strict=True))
    while layers:
        layer, *layers = layers
        kernel = cuda_build.loaded(KERNEL, x.get_device()) if layers and _ends_in_one(x, layer, layers[0]) else None
        x = gpu_linear(x, *layer) if kernel is None else _in_parts(kernel, x, layer, layers.pop(0))
    return x


def _ends_in_one(x: Tensor, layer: _Layer, then: _Layer) -> bool:
    """Whether a layer goes in parts, and the one behind it has a single output."""
    (M, K), N = x.shape, len(layer[0])
    if then[0].shape != (1, N) or not is_long(x.dtype, M, N, K):
        return False
    tensors = [t for t in (x, *layer[:2], *then[:2]) if t is not None]
    biases = all(bias is None or bias.shape == weight.shape[:1] for weight, bias, _ in (layer, then))
    return biases and cuda_call.alike(tensors) and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def _in_parts(kernel: ctypes.CDLL, x: Tensor, layer: _Layer, then: _Layer | None = None) -> Tensor:
    weight, bias, activation = layer
    (M, K), N = x.shape, weight.shape[0]
    done, partial = in_parts(K, PARTS), x.new_empty(PARTS, M, N)
    sums_of_parts(kernel, x, weight, done, partial)
    out = x.new_empty(M, N if then is None else 1)
    rest = short(x[:, done:], weight[:, done:], bias, out, activation, partial)
    if then is None:
        return cuda_call.filled(kernel.fxopt_linear_finish, rest, out)
    return cuda_call.filled(kernel.fxopt_linear_last, last(rest, *then, out), out)


def in_parts(inputs: int, parts: int) -> int:
    """How many of the inputs so many parts take, all of them as aligned as STEP says."""
    return inputs // parts // STEP * STEP * parts


def sums_of_parts(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, done: int, out: Tensor) -> None:
    """out[part] = x @ weight.T over that part of the first `done` inputs of x [M, K] and weight [N, K], dense rows."""
    (parts, M, N), part = out.shape, done // len(out)
    if sliced.fits_in_parts(x, weight, done, parts):
        sliced.launch_parts(kernel, x[:, :done], weight[:, :done], out)
        return
    left = x.as_strided((parts, M, part), (part, x.stride(0), 1))
    torch.bmm(left, weight.as_strided((parts, part, N), (part, 1, weight.stride(0))), out=out)


def last(layer: bytes, weight: Tensor, bias: Tensor | None, activation: str, out: Tensor) -> bytes:
    """last.cuh's Last, of a Short."""
    return layer + struct.pack("<4q", *cuda_call.addresses(weight, bias, out), CODES[activation])


def gpu_padded(x: Tensor, width: int) -> Tensor:
    """x [M, K] -> [M, width], zeros behind K: halves on CUDA in one launch where rows come to start at 16 bytes.

    512 x 415 in bf16 takes 1.5 us, as fill and copy 3.2.
    """
    halves = x.dtype in HALVES and x.stride(1) == 1 and width % ALIGNED == 0
    kernel = cuda_build.loaded(KERNEL, x.get_device()) if halves and 0 < x.shape[0] < MOST_COUNTED and width else None
    if kernel is None:
        return _padded(x, width)
    out = x.new_empty(x.shape[0], width)
    return cuda_call.filled(kernel.fxopt_linear_pad, pad(x, out), out)


def pad(x: Tensor, out: Tensor) -> bytes:
    """linear.cu's Padded."""
    return struct.pack("<3q3i4x", x.data_ptr(), out.data_ptr(), x.stride(0), *x.shape, out.shape[1])


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[1]))


def _fake_padded(x: Tensor, width: int) -> Tensor:
    return x.new_empty(x.shape[0], width)


_SCHEMA = "gpu_linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor"
OPERATORS = Operators(
    (
        Operator(_SCHEMA, reference, facts=BY_ROWS),
        Operator("gpu_padded(Tensor x, int width) -> Tensor", _padded, _fake_padded, facts=BY_ROWS),
    ),
    cuda=KERNEL,
)
