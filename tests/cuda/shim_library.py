"""The CUDA kernel compiled for the CPU (shim/), and calls of it on ordinary tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxopt.kernels.columns.cuda.backward import Entries, room_for, zeros_of
from fxopt.kernels.columns.encode import DTYPES, encode, plan_of
from fxopt.kernels.columns.plan import Plan

CUDA = Path(__file__).resolve().parents[2] / "fxopt/kernels/columns/cuda"
SHIM = Path(__file__).with_name("shim")
GUARD = 16384  # bytes around every output that nobody may write: more than a warp writes at a time
POISON = 0xFF  # in any floating dtype a NaN
_NAMES = {code: getattr(torch, name) for name, code in DTYPES.items()}


class Array(ctypes.Structure):
    """entry.h's Array."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32
)


class Request(ctypes.Structure):
    """entry.h's Request."""

    _fields_ = [
        ("operands", ctypes.POINTER(Array)),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        ("n_operands", ctypes.c_int64),
        ("n_arguments", ctypes.c_int64),
        ("words", ctypes.c_void_p),
        ("n_words", ctypes.c_int64),
        ("allocate", ALLOCATE),
        ("context", ctypes.c_void_p),
    ]


class ShimError(Exception):
    """What the shim found: a load outside every tensor, a deadlock, a write outside an output, a byte nobody wrote."""


def compile_shim(folder: Path, source: Path = CUDA / "columns.cu", *more: str) -> Path:
    """Builds `source` with the host compiler, with shim/ in place of CUDA's headers."""
    output = folder / "shim.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", *more]
    subprocess.run(["c++", *flags, f"-I{SHIM}", "-o", str(output), "-x", "c++", str(source)], check=True)
    return output


class Shim:
    """One compiled library. `run` raises ShimError for what a GPU would not have told."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.fxopt_cuda_columns.restype = ctypes.c_bool
        for name in ("failure", "entries", "sums"):
            getattr(self.library, f"fxopt_cuda_{name}").restype = ctypes.c_bool
        self.library.fxopt_cuda_clamped.restype = ctypes.c_longlong

    def run(self, tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Plan, seed: int = 0) -> list[Tensor]:
        call = self.library.fxopt_cuda_columns
        return self._call(tensors, tables, encode(plan), seed, lambda request, *rest: call(request, *rest))[
            : len(plan.widths)
        ]

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor, seed: int = 0
    ) -> list[Tensor]:
        """As backward() on CUDA, the sort by torch on the CPU."""
        found = [torch.zeros(t.shape) for t in tables]
        self._add_up(grads, *self._entries(grads, tensors, tables, plan, seed).sums(found))
        return found

    def row_gradients(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor, exact: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """As row_gradients() on CUDA: the rows of each table, and their gradients; `exact`: as many as are touched."""
        entries = self._entries(grads, tensors, tables, plan, 0)
        room = None if exact else room_for(grads, tensors, tables, plan_of(plan), entries.keys.numel())
        touched, slots = entries.slots(len(tables), room)
        found = zeros_of([(r.shape[1], t.shape[1]) for r, t in zip(touched, tables, strict=True)], torch.empty(0))
        self._add_up(grads, *entries.sums(found, slots))
        return [(rows[0], grad) for rows, grad in zip(touched, found, strict=True)]

    def _entries(self, grads, tensors, tables, plan, seed) -> Entries:  # type: ignore[no-untyped-def]
        keep = list[object]()
        arrays = _arrays(grads, keep)
        call = self.library.fxopt_cuda_entries
        keys, places, scales = self._call(
            tensors, tables, plan, seed, lambda request, *rest: call(request, arrays, *rest), more=grads
        )
        return Entries(*torch.sort(keys.view(-1), stable=True), places, scales)

    def _add_up(self, grads: Sequence[Tensor], sums: bytes, memory: list[Tensor]) -> None:
        memory[5].fill_(float("nan"))  # sums of chunks
        named, text = [self._name(t) for t in (*grads, memory[5])], ctypes.create_string_buffer(256)
        assert self.library.fxopt_cuda_sums(sums, None, text), text.value
        self._finish(named)

    def _call(self, tensors, tables, words, seed, call, more=()) -> list[Tensor]:  # type: ignore[no-untyped-def]
        keep = list[object]()
        memory: list[tuple[Tensor, tuple[int, int], torch.dtype]] = []

        def allocate(_: object, dim: int, sizes: Sequence[int], dtype: int) -> int:
            rows, width = sizes[:dim]
            size = rows * width * _NAMES[dtype].itemsize
            memory.append((torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8), (rows, width), _NAMES[dtype]))
            return memory[-1][0].data_ptr() + GUARD

        named = [self._name(t) for t in (*tensors, *tables, *more)]
        callback = ALLOCATE(allocate)
        counts = (ctypes.c_int64 * 2)(len(tensors), len(tables))
        request = Request(
            _arrays((*tensors, *tables), keep), counts, sum(counts), 2,
            words.data_ptr(), words.numel(), callback, None,
        )  # fmt: skip
        self.library.shim_seed(ctypes.c_uint64(seed))
        text = ctypes.create_string_buffer(256)
        ok = call(ctypes.byref(request), None, 0, text)
        self._finish(named, ok=ok, text=text)
        return [_checked(*one) for one in memory]

    def _finish(self, named: list[ctypes.c_void_p], ok: bool = True, text: ctypes.Array | None = None) -> None:
        for pointer in named:
            self.library.shim_forget(pointer)
        if not ok:
            raise RuntimeError(text.value.decode() if text else "")
        text = ctypes.create_string_buffer(256)
        self.library.shim_problem(text)
        if text.value:
            raise ShimError(text.value.decode())

    def failure(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.library.fxopt_cuda_failure(0, text)
        return text.value.decode()

    def _name(self, tensor: Tensor) -> ctypes.c_void_p:
        storage = tensor.untyped_storage()
        pointer = ctypes.c_void_p(storage.data_ptr())
        if storage.nbytes():
            self.library.shim_name(pointer, ctypes.c_size_t(storage.nbytes()))
        return pointer


def _arrays(tensors: Sequence[Tensor], keep: list[object]) -> ctypes.Array:
    found = []
    for t in tensors:
        sizes, strides = ((ctypes.c_int64 * max(1, t.dim()))(*values) for values in (t.shape, t.stride()))
        keep += [sizes, strides]
        dtype = DTYPES[str(t.dtype).removeprefix("torch.")]
        found.append(Array(t.data_ptr(), ctypes.addressof(sizes), ctypes.addressof(strides), t.dim(), dtype))
    return (Array * max(1, len(found)))(*found)


def _checked(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if (memory[:GUARD] != POISON).any() or (memory[-GUARD:] != POISON).any():
        raise ShimError("a write outside the output")
    return (
        memory[GUARD:-GUARD].view(dtype).reshape(shape)
        if memory.numel() > 2 * GUARD
        else torch.empty(shape, dtype=dtype)
    )
