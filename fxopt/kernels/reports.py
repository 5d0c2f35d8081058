"""What kernels on a GPU tell after their launch: errors, and how many ids they moved into their table.

A launch waits for nothing, so a kernel leaves a note of what went wrong, and whoever waits for the device may read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_kernels: list[ctypes.CDLL] = []  # that were ever bound: captured graphs keep theirs
_NOTHING: Mapping[int, int] = {}
_counts = ContextVar("counts", default=_NOTHING)


def listen(kernel: ctypes.CDLL) -> bool:
    """Reads from now on what a library of kernels with columns/cuda/errors.cuh tells. False: it did before."""
    if kernel in _kernels:
        return False
    for name in ("failure", "reported"):
        getattr(kernel, f"fxopt_cuda_{name}").restype = ctypes.c_bool
    kernel.fxopt_cuda_clamped.restype = ctypes.c_longlong
    _kernels.append(kernel)
    return True


def clamped(device: int = 0) -> int:
    """How many ids calls with ``bad_ids="clamp"`` have moved on a CUDA device so far; waits for it.

    Each id of each call counts once; lanes that lengths or masks leave out do not count, nor does what CUDA graphs add:
    rows that pad a batch, and the calls that warm up.
    """
    if not _kernels:
        return 0
    torch.cuda.synchronize(device)  # all its streams: a copy waits for the default one alone
    return sum(int(kernel.fxopt_cuda_clamped(device)) for kernel in _kernels)


@contextmanager
def padded(real_rows: Tensor | None, capacity: int, counts: Mapping[int, int] = _NOTHING) -> Iterator[None]:
    """Launches of this thread in here, and graphs that capture them, count clamped ids of real rows alone.

    Args:
        real_rows: [1], int64, on the device, read at each launch: how many rows of the batch are real. None: all are.
        capacity: rows of the padded batch. What has a multiple of them has the same multiple of real ones.
        counts: for padded ids, by the address of their memory, where on the device it says how many are real (int64).
    """
    at, kernels = (0, []) if real_rows is None else (real_rows.data_ptr(), list(_kernels))
    for kernel in kernels:
        kernel.fxopt_cuda_real_rows(ctypes.c_void_p(at), ctypes.c_int64(capacity))
    counted = _counts.set(counts)
    try:
        yield
    finally:
        _counts.reset(counted)
        for kernel in kernels:
            kernel.fxopt_cuda_real_rows(None, ctypes.c_int64(0))


def count_of(ids: Tensor) -> int | None:
    """Where on the device it says how many of these are real; None: all are, as many as there are rows."""
    counts = _counts.get()
    return counts.get(ids.data_ptr()) if counts else None


def reported(device: int = 0) -> bool:
    """Whether :func:`failure` has something to tell already. Does not wait."""
    return any(kernel.fxopt_cuda_reported(device) for kernel in _kernels)


def failure(device: int = 0) -> str | None:
    """Takes what the last launches reported, in the kernel's words; waits for the device."""
    if not _kernels:
        return None
    torch.cuda.synchronize(device)
    text = ctypes.create_string_buffer(256)
    return next((text.value.decode() for k in _kernels if k.fxopt_cuda_failure(device, text)), None)
