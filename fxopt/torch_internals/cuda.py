"""CUDA below torch.cuda: the current stream as a number, the allocator's pools, and the library that torch links to."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import _C

# current_raw_stream(device): as Inductor's launches ask. None in a build of torch without CUDA.
current_raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)


def torch_cuda() -> ctypes.CDLL:
    """torch's own library for CUDA, which has CUDA's runtime and aoti_torch_get_current_cuda_stream in it.

    Raises:
        OSError: this torch has none.
    """
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))


def forget_pool(device: int, pool: Any) -> None:
    """The allocator no longer believes in a capture into this pool.

    Raises:
        RuntimeError: it does not know of one.
    """
    _C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
    _C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]


def bytes_of_pool(pool: Any) -> int:
    """What the allocator has taken from the device for a pool of captured graphs.

    It does not ask for that pool alone: in torch 2.11 to 2.13 memory_snapshot(pool) drops a reference to each number in
    `pool` that it does not own. Numbers above 256 are freed under it, so the process dies after that many captures.
    """
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


def nvrtc() -> ctypes.CDLL:
    """CUDA's compiler as a library, of the version that torch was built with and brings along.

    Raises:
        OSError: this torch has none.
    """
    version = torch.version.cuda
    if version is None:
        raise OSError("this PyTorch was built without CUDA")
    return ctypes.CDLL(f"libnvrtc.so.{version.partition('.')[0]}")


def driver() -> ctypes.CDLL:
    """CUDA's driver, which torch has loaded."""
    return ctypes.CDLL("libcuda.so.1")
