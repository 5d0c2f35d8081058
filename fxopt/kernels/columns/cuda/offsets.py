"""fxopt::jagged_offsets for CUDA: one launch that nobody waits for.

What is wrong with lengths is raised by the next call of fxopt::columns, or by :func:`..errors.check`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import reports
from . import current_kernel

_MOST_CHECKED = 4  # offsets.cuh's
_WIDE = {torch.int32: 0, torch.int64: 1}


class _Lengths(ctypes.Structure):
    """offsets.cuh's Lengths."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lengths", "offsets")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("wide", "exact", "n_ids", "unused")),
        ("rows", ctypes.c_int64 * _MOST_CHECKED),
        ("real", ctypes.c_void_p * _MOST_CHECKED),
        ("errors", ctypes.c_void_p),
    ]


def serves(lengths: Tensor, ids: Sequence[Tensor]) -> bool:
    """Whether :func:`offsets` does."""
    return lengths.dtype in _WIDE and len(ids) <= _MOST_CHECKED


def offsets(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> Tensor:
    """As :func:`..jagged.offsets` on a device whose kernel is loaded, without its errors: see :mod:`.`."""
    device = lengths.get_device()
    with torch.cuda.device(device):
        found, memory, kept = asked(lengths, ids, exact)
        text, stream = ctypes.create_string_buffer(256), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if not current_kernel(device).fxopt_cuda_offsets(ctypes.byref(memory), stream, device, text):
            raise RuntimeError(text.value.decode())
    del kept  # until here its address was in use
    return found


def asked(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> tuple[Tensor, _Lengths, Tensor]:
    """The result's memory, what the kernel takes, and the lengths as it reads them."""
    lengths = lengths.contiguous()
    found = lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)
    memory = _Lengths(
        lengths.data_ptr(), found.data_ptr(), lengths.shape[0], _WIDE[lengths.dtype], exact, len(ids)
    )  # fmt: skip
    for k, tensor in enumerate(ids):
        memory.rows[k], memory.real[k] = tensor.shape[0], reports.count_of(tensor)
    return found, memory, lengths
