"""fxopt::compressed_interaction on CUDA by a kernel of its own, without gradients: compress.cu.

A block computes 128 rows (b, d) by 128 or 64 outputs. Where these tiles leave multiprocessors idle, the products are
split among several blocks, and a second launch adds their sums in a fixed order.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_compress", "fxopt_compress")
_ROWS, _PIECE, _PITCH = 128, 28, 132  # tile.cuh's kRows, kPiece and kRowPitch
_WIDE, _NARROW = 128, 64  # outputs of a block
_STATIC = 1024  # bytes of shared memory that a block has beside the dynamic ones, or the driver keeps
_MOST_COUNTED = (1 << 31) - (1 << 20)
_MOST_BLOCKS = 1 << 15  # of one tile's outputs and splits
_MOST_SPLITS = 32
# What a block does beside its chunks, and what more where a tile's chunks are split over blocks. A chunk takes 1, which
# is 1.6 us by a count of instructions. Both are guesses.
_BESIDE, _BESIDE_SPLIT = 1, 3


def loaded(x: Tensor, y: Tensor, weight: Tensor) -> ctypes.CDLL | None:
    """The library, where it serves these tensors."""
    return cuda_build.loaded(KERNEL, x.get_device()) if _fits(x, y, weight) else None


def _fits(x: Tensor, y: Tensor, weight: Tensor) -> bool:
    tensors, results = (x, y, weight), x.shape[0] * weight.shape[0] * x.shape[2]
    if x.dtype is not torch.float32 or not cuda_call.alike(tensors) or not all(t.numel() for t in tensors):
        return False
    counted = max(results, x.shape[0] * x.shape[2], weight.numel(), *map(_extent, tensors)) <= _MOST_COUNTED
    few = -(-weight.shape[0] // _NARROW) * _MOST_SPLITS < _MOST_BLOCKS
    return counted and few and _shared(_NARROW, y.shape[1]) <= cuda_call.most_shared(x.device)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _shared(outputs: int, M: int) -> int:
    """Bytes of a block: compress.cu's."""
    return 4 * (8 * (_PIECE * outputs + 16) + _PITCH * (M + 3)) + _STATIC


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def compressed(
    kernel: ctypes.CDLL, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The operator by the library that :func:`loaded` gave; then a `bias` [N] without gaps is added, and ReLU."""
    weight = weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()
    exact = torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]
    (B, H, D), M, N = x.shape, y.shape[1], weight.shape[0]
    narrow = N <= _NARROW or _shared(_WIDE, M) > cuda_call.most_shared(x.device)
    tiles = -(-B * D // _ROWS) * -(-N // (_NARROW if narrow else _WIDE))
    splits = splits_for(tiles, _chunks(H, M)[0], _processors(x.device))
    out = x.new_empty(B, N, D)
    partial = x.new_empty(splits, B, N, D) if splits > 1 else None
    words = parameters((x, y, weight), out, partial, narrow, exact, bias, relu)
    return cuda_call.filled(kernel.fxopt_compress, words, out)


def _chunks(H: int, M: int) -> tuple[int, int, int]:
    """How many chunks there are, how many m's one has, and how many of them two h's have."""
    piece = -(-M // -(-M // _PIECE))
    piece += -piece % 4
    pieces = -(-M // piece)
    return -(-H // 2) * pieces, piece, pieces


@functools.cache
def splits_for(tiles: int, chunks: int, processors: int) -> int:
    """Blocks for the chunks of a tile. A multiprocessor runs one of them at a time, in two halves."""

    def time(splits: int) -> int:
        beside = _BESIDE if splits == 1 else _BESIDE_SPLIT
        return -(-tiles * splits // processors) * (-(-chunks // (2 * splits)) + beside)

    return min(range(1, 1 + min(_MOST_SPLITS, -(-chunks // 2))), key=time)


def parameters(
    tensors: Sequence[Tensor],
    out: Tensor,
    partial: Tensor | None,
    narrow: bool = False,
    exact: bool = False,
    bias: Tensor | None = None,
    relu: bool = False,
) -> bytes:
    """tile.cuh's Compress. tensors: x, y and weight, whose rows lie side by side. partial: [splits, B, N, D]."""
    x, y, weight = tensors
    (B, H, D), M, N = x.shape, y.shape[1], weight.shape[0]
    words = cuda_call.addresses(*tensors, bias, out, partial)
    sizes = (B * D, D, H, M, N, 1 if partial is None else len(partial))
    chunks = (*_chunks(H, M), _unit(weight, M))
    numbers = (*x.stride(), *y.stride(), weight.stride(0), *sizes, *chunks, narrow, exact, relu)
    return struct.pack("<6q20i", *words, *numbers)


def _unit(weight: Tensor, M: int) -> int:
    """How many weights can be copied at once: each m's of a pair of h and output begin at a multiple of so many."""
    return next(
        unit for unit in (4, 2, 1) if not (M % unit or weight.stride(0) % unit or weight.data_ptr() % (4 * unit))
    )
