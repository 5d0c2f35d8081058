"""fxopt::columns for CUDA tensors: loading, and what happens to ids outside their table.

The kernel never asserts. A plan's `bad_ids` says what it does: "raise" (the default) writes a row of NaN and a note of
the first bad id, which the next call of fxopt::columns on that device, or :func:`..errors.check`, raises as the CPU
would have; "clamp" takes the nearest row and counts (:func:`clamped`); "unchecked" trusts the ids and follows them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ... import entry
from ...build import Library
from ...build import build as build_cpp
from ...cuda_build import CudaLibrary, arch_of, build
from ..plan import Column

_HERE = Path(__file__).parent
_SHARED = (_HERE.parent / "layout.h", _HERE.parent / "entry.h")
HEADERS = (*sorted((*_HERE.glob("*.cuh"), *_HERE.glob("*.h"))), *_SHARED)
FLAGS = ("-fmad=false",)  # a program's float steps round one by one; an FMA is only where the source says so
KERNEL = CudaLibrary("fxopt_columns_cuda", source=_HERE / "columns.cu", headers=HEADERS, flags=FLAGS)
WRAPPER = Library(
    "fxopt_columns_torch_cuda",
    sources=(_HERE / "torch.cpp",),
    headers=_SHARED,
    cflags=("-O2", "-fvisibility=hidden", entry.STABLE_ABI),
)
_CHUNK, _TABLE_SHIFT = 32, 40  # backward.cuh's
_NO_ROW = (1 << _TABLE_SHIFT) - 1
_wrapper: ctypes.CDLL | None = None
_kernels: dict[tuple[str, ...], ctypes.CDLL] = {}  # by their flags, dots by their name; captured graphs keep theirs
_kernel: ctypes.CDLL | None = None  # that calls use
_captured: list[Tensor] = []  # pinned memory that graphs read


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


def is_loaded() -> bool:
    return _wrapper is not None


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


class _Sums(ctypes.Structure):
    """backward.cuh's Sums."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sorted", "order", "from", "scales", "targets", "head", "tail")),
        *((name, ctypes.c_int64) for name in ("n", "max_dim")),
        *((name, ctypes.c_int32) for name in ("group_log2", "unused")),
        ("slots", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class _Entries:
    """What every id gives, sorted by table and row."""

    keys: Tensor
    order: Tensor
    addresses: Tensor
    scales: Tensor

    @classmethod
    def of(cls, grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> _Entries:
        keys, addresses, scales = torch.ops.fxopt.columns_entries(grads, tensors, tables, plan)
        return cls(*torch.sort(keys.view(-1), stable=True), addresses, scales)

    def sums(self, targets: list[Tensor], slots: Tensor | None = None) -> tuple[_Sums, list[Tensor]]:
        """What the kernel takes, and the memory it points into."""
        n, max_dim = self.keys.numel(), max(target.shape[1] for target in targets)
        known = _uploaded([(target.data_ptr(), target.shape[1]) for target in targets], self.keys.device)
        edges = self.scales.new_empty(2, -(-n // _CHUNK) * max(1, max_dim))
        group_log2 = min(5, max(0, -(-max_dim // 4) - 1).bit_length())
        memory = [self.keys, self.order, self.addresses, self.scales, known, edges]
        pointers = (t.data_ptr() for t in (*memory[:-1], edges[0], edges[1]))
        sums = _Sums(*pointers, n, max_dim, group_log2, 0, None if slots is None else slots.data_ptr())
        return sums, memory if slots is None else [*memory, slots]

    def slots(self, n_tables: int) -> tuple[list[Tensor], Tensor]:
        """The rows of each table that are touched, and each entry's place among them. Waits for the device."""
        rows = self.keys & _NO_ROW
        first = rows != _NO_ROW
        first[1:] &= self.keys[1:] != self.keys[:-1]
        number = first.cumsum(0)
        table_keys = torch.arange(n_tables + 1, device=rows.device) << _TABLE_SHIFT
        starts = torch.cat([number.new_zeros(1), number])[torch.searchsorted(self.keys, table_keys)]
        bounds = starts.tolist()
        touched = rows.new_empty(bounds[-1] + 1)  # and one for all that are not the first of their row
        touched.scatter_(0, torch.where(first, number - 1, bounds[-1]), rows)
        slots = number - 1 - starts[self.keys >> _TABLE_SHIFT]
        return [touched[a:b] for a, b in itertools.pairwise(bounds)], slots


def _uploaded(numbers: list[tuple[int, int]], device: torch.device) -> Tensor:
    """On the device, without waiting for it. A captured graph copies them again at each replay."""
    given = torch.tensor(numbers, pin_memory=device.type == "cuda")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(given)
    return given.to(device, non_blocking=True)


def backward(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    """fxopt::columns_backward for CUDA: a stable sort by table and row, then sums in the order of the ids.

    Args:
        grads: float32, contiguous, one for each output of the plan.
        plan: of columns that :func:`differentiates` accepts.
    """
    found = [torch.empty_like(table, memory_format=torch.contiguous_format) for table in tables]
    if found:
        torch._foreach_zero_(found)
        _add_up(*_Entries.of(grads, tensors, tables, plan).sums(found))
    return found


def row_gradients(grads: list[Tensor], tensors: list[Tensor], tables: list[Tensor], plan: Tensor) -> list[Tensor]:
    """fxopt::columns_row_gradients for CUDA, of what :func:`backward` takes: rows [1, U] and gradients [U, D] each."""
    if not tables:
        return []
    entries = _Entries.of(grads, tensors, tables, plan)
    touched, slots = entries.slots(len(tables))
    found = [table.new_empty(len(rows), table.shape[1]) for rows, table in zip(touched, tables, strict=True)]
    _add_up(*entries.sums(found, slots))
    return [tensor for rows, grad in zip(touched, found, strict=True) for tensor in (rows[None], grad)]


def _add_up(sums: _Sums, memory: list[Tensor]) -> None:
    assert _kernel is not None
    text = ctypes.create_string_buffer(256)
    with torch.cuda.device(memory[0].device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if not _kernel.fxopt_cuda_sums(ctypes.byref(sums), stream, text):
            raise RuntimeError(text.value.decode())


def differentiates(column: Column, dtype: str) -> bool:
    """Whether :func:`backward` serves a column that writes outputs of `dtype`."""
    scaled = (
        column.weights or column.divisor or column.is_masked or (column.pool == "mean" and column.padding is not None)
    )
    return dtype == "float32" and column.pool != "max" and not scaled and bool(column.bag or column.source.rows)
