"""fxopt::table_batched: FBGEMM's lookup in tables of 2 to 32 bits, with its check of ids in the same pass.

FBGEMM (Khudia et al., 2021) checks all ids in one operator and looks them up in another, behind 100 lines of Python:
26 tables of 64 at batch 1 take 11 us in these two operators alone, and 3 us here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import Operator, Operators, cpu_library

_MEMORY = "Tensor memory, Tensor types, Tensor places, Tensor rows, Tensor dims"
_BAGS = "Tensor ids, Tensor offsets, Tensor? weights, int pooling, int alignment, int width"
_SCHEMA = f"table_batched({_MEMORY}, {_BAGS}) -> Tensor"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "rows.h", (_SCHEMA,))
MEAN, NONE = 1, 2  # of FBGEMM's PoolingMode
BITS = (32, 16, 8, 4, 2)  # of FBGEMM's SparseType, from FP32 to INT2
_HEADER = 4  # bytes of a scale and an offset in front of codes


def table_batched(
    memory: Tensor, types: Tensor, places: Tensor, rows: Tensor, dims: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int, alignment: int, width: int,
) -> Tensor:  # fmt: skip
    """float32 [B, sum of D], or without pooling [N, D]: rows, which are numbers or scale * codes + offset.

    Args:
        memory: uint8; a row is D numbers of 32 or 16 bits, or its scale and its offset, float16 each, and D codes of 8,
            4 or 2 bits, the first one lowest. Then comes room up to `alignment` bytes.
        types, places, rows: [F], of each feature's table: place in BITS, its first byte in the memory, how many rows.
        dims: int32 [F + 1], where the numbers of each feature begin in a row of the output.
        ids: int32 or int64 [N]. offsets: int32 or int64 [F * B + 1]. weights: float32 [N], or None.
        pooling: FBGEMM's PoolingMode.
        width: of a row of the result, which no other size tells.

    Raises:
        RuntimeError: an id outside of its table, or a description that does not fit the memory.
    """
    starts, places_, rows_ = dims.tolist(), places.tolist(), rows.tolist()
    if width != (starts[1] if pooling == NONE else starts[-1]):
        raise RuntimeError(f"fxopt.table_batched: expected rows of {width} numbers")
    if (types >= len(BITS)).any() or offsets[0] != 0 or (pooling == NONE and offsets[-1] != ids.shape[0]):
        raise RuntimeError("fxopt.table_batched: expected tables of 2 to 32 bits, and offsets of these ids")
    found = []
    for f, part in enumerate(offsets[:-1].view(len(places_), -1)):
        D = starts[f + 1] - starts[f]
        values = _numbers(memory[places_[f] :], BITS[types[f]], rows_[f], D, alignment)
        end = offsets[(f + 1) * part.shape[0]]
        mine = slice(int(part[0]) if len(part) else 0, int(end) if len(part) else 0)
        if not bool(((ids[mine] >= 0) & (ids[mine] < rows_[f])).all()):
            raise RuntimeError("fxopt.table_batched: an id outside of its table")
        if pooling == NONE:
            found.append(values[ids[mine].long()])
            continue
        given = None if weights is None else weights[mine]
        sums = F.embedding_bag(ids[mine], values, part - part[:1], mode="sum", per_sample_weights=given)
        lengths = torch.cat([part, end.view(1)]).diff().clamp(min=1).view(-1, 1)
        found.append(sums / lengths if pooling == MEAN else sums)
    return torch.cat(found, 0 if pooling == NONE else 1)


def _numbers(memory: Tensor, bits: int, rows: int, D: int, alignment: int) -> Tensor:
    """[R, D] of the table that begins with the memory."""
    header, bytes_ = _HEADER * (bits <= 8), D * bits // 8
    stride = -(-(header + bytes_) // alignment) * alignment
    table = memory[: rows * stride].view(rows, stride)
    codes = table[:, header : header + bytes_].clone()
    if bits > 8:
        return codes.view(torch.float16 if bits == 16 else torch.float32).float()
    scale, low = table[:, :_HEADER].clone().view(torch.float16).float().split(1, 1)
    parts = codes.unsqueeze(2) >> torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (parts & (2**bits - 1)).flatten(1).float() * scale + low


def call_of(pooling: int, alignment: int, width: int) -> Callable[..., Tensor]:
    """The operator for one plan, past the dispatcher where it can be."""
    return OPERATORS.call_of("table_batched", torch.tensor([pooling, alignment, width], device="cpu"))


def _fake(
    memory: Tensor, types: Tensor, places: Tensor, rows: Tensor, dims: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int, alignment: int, width: int,
) -> Tensor:  # fmt: skip
    rows_ = ids.shape[0] if pooling == NONE else (offsets.shape[0] - 1) // places.shape[0]
    return memory.new_empty((rows_, width), dtype=torch.float32)


OPERATORS = Operators((Operator(_SCHEMA, table_batched, _fake),), KERNEL)
