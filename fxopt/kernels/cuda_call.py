"""Calls of CUDA kernels on tensors: what floats.cuh names, packed as bytes."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fxopt.torch_internals.cuda import current_raw_stream

T = TypeVar("T")
_MOST_SHARED = 99 * 1024
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def operands(tensors: Sequence[Tensor | None], most: int) -> bytes:
    """`most` of floats.cuh's Operand. A dim of size 1 has stride 0: one value for all; None is a null pointer."""
    words: list[int] = []
    for tensor in tensors:
        if tensor is None:
            words += (0,) * 4
            continue
        strides = (stride if size != 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        words += (tensor.data_ptr(), *strides, *(0,) * (3 - tensor.dim()))
    return struct.pack(f"<{4 * most}q", *words, *(0,) * (4 * most - len(words)))


def addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    """Where tensors lie; None is a null pointer."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


@functools.cache
def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; of any device where nothing is known of this one."""
    if device.type != "cuda":
        return _MOST_SHARED
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _MOST_SHARED)


def alike(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these, but for None, are on one GPU, of one dtype that the kernels know, and record no gradients."""
    given = [tensor for tensor in tensors if tensor is not None]
    first = given[0]
    same = all(tensor.dtype is first.dtype and tensor.device == first.device for tensor in given)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return same and first.is_cuda and first.dtype in DTYPES and not recorded


def launch(function: Callable[..., bytes | None], parameters: bytes, like: Tensor) -> None:
    """Runs a library's function of (parameters, dtype, stream) on the current stream.

    Raises:
        RuntimeError: the launch failed.
    """
    text = on_stream(lambda stream: function(parameters, DTYPES[like.dtype], stream), like.get_device())
    if text:
        raise RuntimeError(text.decode())


def filled(function: Callable[..., bytes | None], parameters: bytes, out: Tensor) -> Tensor:
    """`out` with what a function, called as by :func:`launch`, writes there; nothing where there is no room."""
    if out.numel():
        launch(function, parameters, out)
    return out


def on_stream(function: Callable[[int], T], device: int) -> T:
    """A function of the current stream of a GPU, called with that GPU as the current one."""
    with contextlib.nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device):
        # as Inductor's launches do: less of the host's time than torch.cuda.device and current_stream take
        return function(current_raw_stream(device))
