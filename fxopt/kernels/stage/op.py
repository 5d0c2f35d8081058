"""Static memory for the inputs of a captured graph, the launch that fills it, and the one that copies outputs out.

An input is rows of bytes. It is copied as it lies (rows may be any distance apart) and padded to its capacity. Tensors
on the device take one launch for all of them; those on the host are packed into pinned memory and take one copy. The
same launch says how many rows are real and where the outputs go: the last launch of the graph copies them there.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .. import cuda_build
from ..build import PYTHON_CFLAGS, Library, imported
from ..cache import BuildError

_HERE = Path(__file__).parent
KERNEL = cuda_build.CudaLibrary("fxopt_stage", source=_HERE / "stage.cu")
POINTERS = Library(
    "fxopt_stage_pointers",
    sources=(_HERE / "pointers.cpp",),
    cflags=(*PYTHON_CFLAGS, "-O2"),
    beside_cuda=True,
)
MOST_INPUTS, _MOST_OUTPUTS = 1970, 64  # two words each, in 32 KB of launch parameters
MOST_BYTES = 2**31 - 1  # of one padded input
_MOST_ROWS = 2**31 - 1
ONES, REPEAT = -1, -2  # slots.h's Fill
_ITEM_BYTES = 4096
_ALIGN = 256
_RING = 4  # calls whose host inputs are on their way


@dataclass(frozen=True)
class Room:
    """Static memory of one input: its padded shape, and what rows behind its own hold.

    fill: ONES, REPEAT (the last row again), or the number of an input whose count of rows is written there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    fill: int

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def capacity(self) -> int:
        return self.shape[0] if self.shape else 1


class _Stage(ctypes.Structure):
    """slots.h's Stage."""

    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("n_items", ctypes.c_int32),
        ("n_inputs", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
        ("pinned", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("packed_bytes", ctypes.c_int64),
        ("n_packed", ctypes.c_int32),
        ("n_outputs", ctypes.c_int32),
        ("targets", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    ]


class Inputs:
    """The words that describe one call's inputs; `pointers` is the compiled module."""

    def __init__(self, count: int) -> None:
        self.words = array("q", bytes(16 * max(1, count)))  # read one by one 20 times faster than a tensor
        self.at, self._describe = self.words.buffer_info()[0], pointers().describe

    def read(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Describes them. Returns them, with those copied that lie too wildly: keep it until the launch.
        None: one is too large to be described."""
        while (wild := self._describe(tensors, self.at)) >= 0:
            if tensors[wild].shape[:1] > (_MOST_ROWS,):
                return None
            tame = tensors[wild].resolve_conj().resolve_neg().contiguous()
            if tame is tensors[wild]:
                return None
            tensors = [*tensors]
            tensors[wild] = tame
        return tensors

    def rows(self, number: int) -> int:
        return self.words[2 * number + 1] & 0x7FFFFFFF


class Fixed:
    """Tensors that a graph was captured with, by address: where they were, how they lay, and numbers on the CPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words = array("q", bytes(16 * max(1, len(tensors))))
        self._at, self._unmoved = self._words.buffer_info()[0], pointers().unmoved
        pointers().words(tensors, self._at)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many as there were still are."""
        return self._unmoved(tensors, self._at)  # type: ignore[no-any-return]


class Targets:
    """What a call tells a graph beside its inputs: how many of its rows are real, and where its outputs go.

    Args:
        outputs: the graph's own.
        rows: of each output how many a row of the batch has; 0: its first axis is not the batch.
    """

    def __init__(self, outputs: Sequence[Tensor] = (), rows: Sequence[int] = ()) -> None:
        self._words = array("q", bytes(16 * (1 + len(outputs))))
        self.at, self._fresh = self._words.buffer_info()[0], pointers().fresh
        self._outputs, self._rows = list(outputs), list(rows)

    def fresh(self, batch: int) -> list[Tensor]:
        """New memory for the outputs of a batch, which is where they go from now on."""
        return self._fresh(self._outputs, self._rows, batch, self.at + 16)  # type: ignore[no-any-return]

    def count(self, real_rows: int) -> None:
        self._words[0] = real_rows


class Stage:
    """Static memory for inputs on one device.

    Attributes:
        tensors: the padded inputs, all on the device.
        real_rows: [1], int64, how many rows of the batch are real.
        counts: int64, for each input how many of its rows are.
    """

    def __init__(self, rooms: Sequence[Room], device: torch.device) -> None:
        offsets, size = _places(rooms)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = [_view(self._memory, at, room) for at, room in zip(offsets, rooms, strict=True)]
        packed = [k for k, room in enumerate(rooms) if room.on_host]
        packed_bytes = max((offsets[k] + rooms[k].row_bytes * rooms[k].capacity for k in packed), default=0)
        pinned = [
            torch.empty(packed_bytes, dtype=torch.uint8, device="cpu").pin_memory()
            for _ in range(_RING if packed else 0)
        ]
        here, there = ([k for k in range(len(rooms)) if rooms[k].on_host is host] for host in (False, True))
        slots = _slots(rooms, here, offsets, self._memory.data_ptr())
        items = [
            (slot, part)
            for slot, k in enumerate(here)
            for part in range(-(-rooms[k].row_bytes * rooms[k].capacity // _ITEM_BYTES))
        ]
        on_device = [
            torch.frombuffer(bytearray(data or bytes(8)), dtype=torch.uint8).to(device)
            for data in (slots, struct.pack(f"<{2 * len(items)}i", *(x for item in items for x in item)))
        ]
        self._keep: list[object] = [*on_device, *pinned]
        targets = torch.zeros(2 * (1 + _MOST_OUTPUTS), dtype=torch.int64, device=device)
        self.real_rows = targets[:1]  # keeps all of them
        self.counts = torch.zeros(max(1, len(rooms)), dtype=torch.int64, device=device)
        self._stages = []
        for pinned_at in [memory.data_ptr() for memory in pinned] or [0]:
            table = _slots(rooms, there, offsets, pinned_at)
            held = ctypes.create_string_buffer(table or b"\0")
            self._keep.append(held)
            self._stages.append(
                _Stage(
                    on_device[0].data_ptr(), on_device[1].data_ptr(), len(items), len(rooms), ctypes.addressof(held),
                    pinned_at, self._memory.data_ptr(), packed_bytes, len(there), 0, targets.data_ptr(),
                    self.counts.data_ptr(),
                )
            )  # fmt: skip
        self._copied = [torch.cuda.Event() for _ in pinned]
        self._turn = 0
        self._kernel = kernel(self._memory.get_device())
        self._run = self._kernel.fxopt_stage
        self._text = ctypes.create_string_buffer(256)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """The memory is not given to others before what this stream was told until then is done."""
        self._memory.record_stream(stream)
        self.real_rows.record_stream(stream)
        self.counts.record_stream(stream)

    def fill(self, inputs: Inputs, targets: Targets, stream: int) -> None:
        """Queues the copies of what `inputs` describes on the current stream, given by its number."""
        self._turn = (self._turn + 1) % len(self._stages)
        if self._copied:
            self._copied[self._turn].synchronize()  # the copy of four calls ago
        stage = self._stages[self._turn]
        if not self._run(ctypes.byref(stage), inputs.at, targets.at, stream, self._text):
            raise RuntimeError(self._text.value.decode())
        if self._copied:
            self._copied[self._turn].record()

    def deliver(self, outputs: Sequence[Tensor], stream: int) -> bool:
        """Queues the copies of all outputs to the targets that a fill names. False: not of these, nothing is queued."""
        if not 0 < len(outputs) <= _MOST_OUTPUTS or not all(map(_is_its_memory, outputs)):
            return False
        for stage in self._stages:
            stage.n_outputs = len(outputs)
        addresses = (ctypes.c_void_p * len(outputs))(*(x.data_ptr() for x in outputs))
        most = max(x.numel() * x.itemsize for x in outputs)
        if not self._kernel.fxopt_deliver(ctypes.byref(self._stages[0]), addresses, most, stream, self._text):
            raise RuntimeError(self._text.value.decode())
        return True


def _is_its_memory(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(rooms: Sequence[Room]) -> int:
    """What a Stage for them takes on the device.

    Raises:
        ValueError: an input is larger than a launch can copy.
    """
    return _places(rooms)[1]


def _places(rooms: Sequence[Room]) -> tuple[list[int], int]:
    """An offset for each input, those on the host first and side by side, and the size of all."""
    offsets, size = [0] * len(rooms), 0
    for k in sorted(range(len(rooms)), key=lambda k: not rooms[k].on_host):
        bytes_ = rooms[k].row_bytes * rooms[k].capacity
        if bytes_ > MOST_BYTES:
            raise ValueError(f"fxopt.stage: input {k} takes {bytes_} bytes, expected at most {MOST_BYTES}")
        offsets[k] = size
        size += -(-max(bytes_, 1) // _ALIGN) * _ALIGN
    return offsets, size


def _view(memory: Tensor, at: int, room: Room) -> Tensor:
    flat = memory[at : at + room.row_bytes * room.capacity]
    return flat.view(room.dtype).view(room.shape)


def _slots(rooms: Sequence[Room], chosen: Sequence[int], offsets: Sequence[int], base: int) -> bytes:
    records = (
        struct.pack("<QqqIi", base + offsets[k], rooms[k].row_bytes, rooms[k].capacity, k, rooms[k].fill)
        for k in chosen
    )
    return b"".join(records)


@functools.cache
def kernel(device: int) -> ctypes.CDLL:
    """The library for a device.

    Raises:
        BuildError: it cannot be made or loaded.
    """
    library = cuda_build.loaded(KERNEL, device)
    if library is None:
        raise BuildError(cuda_build.missing(KERNEL, device))
    library.fxopt_stage.restype = ctypes.c_bool
    library.fxopt_stage.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_char_p)
    library.fxopt_deliver.restype = ctypes.c_bool
    library.fxopt_deliver.argtypes = (*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
    return library


@functools.cache
def pointers() -> ModuleType:
    """pointers.cpp as a module.

    Raises:
        BuildError: no working compiler, or a Python whose tensors it cannot read.
    """
    return imported(POINTERS)
