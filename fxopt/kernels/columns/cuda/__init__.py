"""fxopt::columns for CUDA tensors: loading, and what happens to ids outside their table.

The kernel never asserts. A plan's `bad_ids` says what it does: "raise" (the default) writes a row of NaN and a note of
the first bad id, which the next call of fxopt::columns on that device, or :func:`..errors.check`, raises as the CPU
would have; "clamp" takes the nearest row and counts (:func:`clamped`); "unchecked" trusts the ids and follows them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ... import entry
from ...build import Library
from ...build import build as build_cpp
from ...cuda_build import EARLY, CudaLibrary, arch_of, build

_HERE = Path(__file__).parent
_SHARED = (_HERE.parent / "layout.h", _HERE.parent / "entry.h")
HEADERS = (*sorted((*_HERE.glob("*.cuh"), *_HERE.glob("*.h"))), *_SHARED, EARLY)
FLAGS = ("-fmad=false",)  # a program's float steps round one by one; an FMA is only where the source says so
KERNEL = CudaLibrary("fxopt_columns_cuda", source=_HERE / "columns.cu", headers=HEADERS, flags=FLAGS)
WRAPPER = Library(
    "fxopt_columns_torch_cuda",
    sources=(_HERE / "torch.cpp",),
    headers=_SHARED,
    cflags=("-O2", "-fvisibility=hidden", entry.STABLE_ABI),
)
_wrapper: ctypes.CDLL | None = None
_kernels: dict[tuple[str, ...], ctypes.CDLL] = {}  # by their flags, dots by their name; captured graphs keep theirs
_kernel: ctypes.CDLL | None = None  # that calls use


def load() -> int | None:
    """Builds where needed, and registers the kernel of the current device's architecture.

    Returns the address of its entry, None when it was loaded before.

    Raises:
        BuildError, OSError: there is no nvcc, or a library cannot be made or loaded.
    """
    global _wrapper
    if _wrapper is not None:
        return None
    path = build_cpp(WRAPPER)
    torch.ops.load_library(path)
    wrapper = ctypes.CDLL(str(path))
    use(wrapper=wrapper)
    _wrapper = wrapper
    return ctypes.cast(wrapper.fxopt_cuda_run, ctypes.c_void_p).value


def use(flags: tuple[str, ...] = (), wrapper: ctypes.CDLL | None = None) -> None:
    """Calls from now on go to the kernel built with `flags` more."""
    global _kernel
    if flags not in _kernels:
        _kernels[flags] = _opened(replace(KERNEL, flags=(*KERNEL.flags, *flags)))
    _kernel = _kernels[flags]
    torch_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    addresses = (_kernel.fxopt_cuda_columns, _kernel.fxopt_cuda_entries, torch_cuda.aoti_torch_get_current_cuda_stream)
    wrapper = wrapper or _wrapper
    assert wrapper is not None
    wrapper.fxopt_cuda_bind(*(ctypes.cast(f, ctypes.c_void_p) for f in addresses))


def current_kernel() -> ctypes.CDLL:
    """The one that calls use now; :func:`load` comes before."""
    assert _kernel is not None
    return _kernel


def bind_dots(library: CudaLibrary) -> bool:
    """Calls of fxopt::columns_dots go to this library, whose ids are seen to as the columns' are.

    Returns:
        False: the columns' own library is not loaded.

    Raises:
        BuildError, OSError: it cannot be made or loaded.
    """
    if _wrapper is None:
        return False
    kernel = _opened(library)
    _wrapper.fxopt_cuda_bind_dots(ctypes.cast(kernel.fxopt_cuda_dots, ctypes.c_void_p))
    _kernels[(library.name,)] = kernel
    return True


def _opened(library: CudaLibrary) -> ctypes.CDLL:
    kernel = ctypes.CDLL(str(build(library, arch_of(torch.cuda.get_device_capability()))))
    for name in ("failure", "reported", "sums"):
        if hasattr(kernel, f"fxopt_cuda_{name}"):
            getattr(kernel, f"fxopt_cuda_{name}").restype = ctypes.c_bool
    kernel.fxopt_cuda_clamped.restype = ctypes.c_longlong
    kernel.fxopt_cuda_blocking(os.environ.get("CUDA_LAUNCH_BLOCKING") == "1")
    return kernel


def clamped(device: int = 0) -> int:
    """How many ids "clamp" has moved so far. Waits for the device."""
    if not _kernels:
        return 0
    torch.cuda.synchronize(device)  # all its streams: a copy waits for the default one alone
    return sum(int(kernel.fxopt_cuda_clamped(device)) for kernel in _kernels.values())


@contextmanager
def padded(real_rows: Tensor | None, capacity: int) -> Iterator[None]:
    """Launches of this thread in here, and graphs that capture them, count clamped ids of real rows alone.

    Args:
        real_rows: [1], int64, on the device, read at each launch: how many rows of the batch are real. None: all are.
        capacity: rows of the padded batch. What has a multiple of them has the same multiple of real ones.
    """
    at, kernels = (0, []) if real_rows is None else (real_rows.data_ptr(), list(_kernels.values()))
    for kernel in kernels:
        kernel.fxopt_cuda_real_rows(ctypes.c_void_p(at), ctypes.c_int64(capacity))
    try:
        yield
    finally:
        for kernel in kernels:
            kernel.fxopt_cuda_real_rows(None, ctypes.c_int64(0))


def reported(device: int = 0) -> bool:
    """Whether :func:`failure` has something to tell already. Does not wait."""
    return any(kernel.fxopt_cuda_reported(device) for kernel in _kernels.values())


def failure(device: int = 0) -> str | None:
    """Takes what the last launches reported, in the kernel's words; waits for the device."""
    if not _kernels:
        return None
    torch.cuda.synchronize(device)
    text = ctypes.create_string_buffer(256)
    return next((text.value.decode() for k in _kernels.values() if k.fxopt_cuda_failure(device, text)), None)
