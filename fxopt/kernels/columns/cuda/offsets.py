"""fxopt::jagged_offsets for CUDA: one launch that nobody waits for.

What is wrong with lengths is raised by the next call of fxopt::columns, or by :func:`..errors.check`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import cuda_call, reports
from . import call

_MOST_CHECKED = 4  # offsets.cuh's
_WIDE = {torch.int32: 0, torch.int64: 1}


def serves(lengths: Tensor, ids: Sequence[Tensor]) -> bool:
    """Whether :func:`offsets` does."""
    return lengths.dtype in _WIDE and len(ids) <= _MOST_CHECKED


def offsets(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> Tensor:
    """As :func:`..jagged.offsets` on a device whose kernel is loaded, without its errors: see :mod:`.`."""
    found, parameters, kept = asked(lengths, ids, exact)
    device = lengths.get_device()
    call("fxopt_cuda_offsets", device, parameters, device)
    del kept  # until here its address was in use
    return found


def asked(lengths: Tensor, ids: Sequence[Tensor], exact: bool) -> tuple[Tensor, bytes, Tensor]:
    """The result's memory, offsets.cuh's Lengths, and the lengths as it reads them."""
    lengths = lengths.contiguous()
    found, empty = lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64), [0] * (_MOST_CHECKED - len(ids))
    rows, real = (tensor.shape[0] for tensor in ids), (reports.count_of(tensor) or 0 for tensor in ids)
    sizes = lengths.shape[0], _WIDE[lengths.dtype], exact, len(ids), 0
    numbers = *cuda_call.addresses(lengths, found), *sizes, *rows, *empty, *real, *empty, 0
    return found, struct.pack("<3q4i9q", *numbers), lengths
