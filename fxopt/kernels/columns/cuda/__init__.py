"""fxopt::columns for CUDA tensors: loading, and what happens to ids outside their table.

The kernel never asserts. A plan's `bad_ids` says what it does: "raise" (the default) writes a row of NaN and a note of
the first bad id, which the next call of fxopt::columns on that device, or :func:`..errors.check`, raises as the CPU
would have; "clamp" takes the nearest row and counts (:func:`..errors.clamped`); "unchecked" trusts the ids and
follows them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import replace
from pathlib import Path

import torch

from fxopt.torch_internals.cuda import torch_cuda

from ... import cuda_build, cuda_call, entry, reports
from ...build import Library
from ...build import build as build_cpp
from ...cache import BuildError
from ...cuda_build import CudaLibrary, arch_on

_HERE = Path(__file__).parent
FLAGS = ("-fmad=false",)  # a program's float steps round one by one; an FMA is only where the source says so
KERNEL = CudaLibrary("fxopt_columns_cuda", source=_HERE / "columns.cu", flags=FLAGS)
WRAPPER = Library(
    "fxopt_columns_torch_cuda",
    sources=(_HERE / "torch.cpp",),
    cflags=("-O2", "-fvisibility=hidden", entry.STABLE_ABI),
    beside_cuda=True,
)
_current: dict[int, ctypes.CDLL] = {}  # by device: that calls use


def load(device: int) -> int | None:
    """Builds where needed, and binds the kernel of a device's architecture to all devices of the same.

    Returns the address of the entry to every device's kernel; None where this one has none.

    Raises:
        BuildError, OSError: what stands between torch and the kernel cannot be made or loaded.
    """
    if cuda_build.loaded(KERNEL, device) is None:
        return None
    for other in range(torch.cuda.device_count()):
        if not serves(other) and arch_on(other) == arch_on(device):
            use(device=other)
    return ctypes.cast(_wrapper().fxopt_cuda_run, ctypes.c_void_p).value


@functools.cache
def _wrapper() -> ctypes.CDLL:
    path = build_cpp(WRAPPER)
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def serves(device: int) -> bool:
    """Whether a device has a kernel; the first columns there load it."""
    return device in _current


def use(flags: tuple[str, ...] = (), device: int | None = None) -> None:
    """Calls on a device (None: the current one) go from now on to the kernel built with `flags` more.

    Raises:
        BuildError, OSError: it cannot be made or loaded.
    """
    device = torch.cuda.current_device() if device is None else device
    kernel = _opened(_variant(flags) if flags else KERNEL, device)
    current_stream = torch_cuda().aoti_torch_get_current_cuda_stream
    addresses = (kernel.fxopt_cuda_columns, kernel.fxopt_cuda_entries, current_stream)
    _wrapper().fxopt_cuda_bind(device, *(ctypes.cast(f, ctypes.c_void_p) for f in addresses))
    _current[device] = kernel


@functools.cache
def _variant(flags: tuple[str, ...]) -> CudaLibrary:
    return replace(KERNEL, flags=(*KERNEL.flags, *flags))


def call(name: str, device: int, parameters: bytes, *more: object) -> None:
    """A function (parameters, stream, *more, text) of the kernel that calls on a device use now, on the current stream.

    Raises:
        RuntimeError: the kernel refuses; :func:`load` comes before.
    """
    text, function = ctypes.create_string_buffer(256), getattr(_current[device], name)
    if not cuda_call.on_stream(lambda stream: function(parameters, ctypes.c_void_p(stream), *more, text), device):
        raise RuntimeError(text.value.decode())


def bind_dots(library: CudaLibrary, device: int) -> None:
    """Calls of fxopt::columns_dots on a device go to this library, whose ids are seen to as the columns' are.

    Raises:
        BuildError, OSError: it cannot be made or loaded.
    """
    kernel = _opened(library, device)
    _wrapper().fxopt_cuda_bind_dots(device, ctypes.cast(kernel.fxopt_cuda_dots, ctypes.c_void_p))


def _opened(library: CudaLibrary, device: int) -> ctypes.CDLL:
    kernel = cuda_build.loaded(library, device)
    if kernel is None:
        raise BuildError(cuda_build.missing(library, device))
    if reports.listen(kernel):
        if hasattr(kernel, "fxopt_cuda_sums"):
            kernel.fxopt_cuda_sums.restype = ctypes.c_bool
        kernel.fxopt_cuda_blocking(os.environ.get("CUDA_LAUNCH_BLOCKING") == "1")
    return kernel
