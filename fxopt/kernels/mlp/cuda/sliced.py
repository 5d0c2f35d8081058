"""Layers that leave cuBLAS idle, as sliced.cuh computes them: alone, or with what a cross network does to them."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ... import cuda_call
from .ways import ALIGNED_FLOATS, MOST_BLOCKS, blocks_of, is_sliced, tf32

_MOST_STRIDE = 2**27  # floats: the kernel counts several rows in 32 bits


def fits(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether the kernel serves x [M, K] by weight [N, K], and others of [M, N], and wins."""
    (M, K), N = x.shape, weight.shape[0]
    readable = all(lines.stride(1) == 1 and _in_32_bits(lines) for lines in (x, weight, *others))
    return x.dtype is torch.float32 and readable and is_sliced(M, N, K, _aligned(x) and _aligned(weight))


def _in_32_bits(lines: Tensor) -> bool:
    return lines.stride(0) < _MOST_STRIDE


def _aligned(lines: Tensor) -> bool:
    """Whether every line starts at 16 bytes and ends there."""
    return (lines.shape[1] | lines.stride(0)) % ALIGNED_FLOATS == 0 and lines.data_ptr() % 16 == 0


def launch(
    kernel: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    factor: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """activation(x @ weight.T + bias), with a factor addend + factor * that: [M, N]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    words = parameters(x, weight, bias, out, activation, factor, addend, in_tf32=tf32())
    return cuda_call.filled(kernel.fxopt_linear_sliced, words, out)


def fits_in_parts(x: Tensor, weight: Tensor, K: int, parts: int) -> bool:
    """Whether the kernel serves x by weight in so many parts of K inputs in all, in float32 and of dense rows, and wins
    over a batched product.

    H200, microseconds, of 8 parts and so many blocks: in TF32 256 x 1024 by 128 (256) 3.2 and 3.7, 64 x 1024 by 256
    (128) 2.6 and 3.7, 32 x 2048 by 512 (128) 3.1 and 4.7, 256 x 1024 by 256 (512) 5.6 and 4.0, 64 x 10400 by 128 (64)
    7.2 and 9.0, 256 x 10400 by 128 (256) 12.5 and 10.3; in full fp32 3.2 to 13.8 where the product takes 4.6 to 24.9,
    and 256 x 10400 by 128 25.1 and 32.7.
    """
    blocks = blocks_of(len(x), len(weight)) * parts
    few = blocks <= MOST_BLOCKS and (not tf32() or K <= 2048 or blocks <= MOST_BLOCKS // 2)
    return few and _in_32_bits(x) and _in_32_bits(weight)


def launch_parts(kernel: ctypes.CDLL, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[part] = x @ weight.T over so many parts of the inputs, one behind the other: [parts, M, N]."""
    words = parameters(x, weight, None, out, 0, in_tf32=tf32(), parts=len(out))
    cuda_call.launch(kernel.fxopt_linear_sliced, words, x)


def parameters(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: int,
    factor: Tensor | None = None,
    addend: Tensor | None = None,
    *,
    in_tf32: bool,
    parts: int = 1,
) -> bytes:
    """sliced.cuh's Sliced; of several parts of the inputs, out is [parts, M, N]."""
    addresses = cuda_call.addresses(x, weight, bias, factor, addend, out)
    strides = (0 if tensor is None else tensor.stride(0) for tensor in (x, weight, factor, addend))
    sizes = x.shape[0], weight.shape[0], x.shape[1] // parts
    return struct.pack("<6q10i", *addresses, *strides, *sizes, activation, in_tf32, parts)
