"""fxopt::table_batched: FBGEMM's lookup in quantized tables, with its check of ids in the same pass.

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
_SCHEMA = f"table_batched({_MEMORY}, Tensor ids, Tensor offsets, Tensor? weights, int pooling, int alignment) -> Tensor"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "rows.h", (_SCHEMA,))
INT8, MEAN, NONE = 2, 1, 2  # of FBGEMM's SparseType and PoolingMode
_HEADER = 4


def table_batched(
    memory: Tensor, types: Tensor, places: Tensor, rows: Tensor, dims: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int, alignment: int,
) -> Tensor:  # fmt: skip
    """float32 [B, sum of D], or without pooling [N, D]: rows of scale * codes + offset.

    Args:
        memory: uint8; a row is its scale and its offset, float16 each, then D codes, and room up to `alignment` bytes.
        types, places, rows: [F], of each feature's table: INT8, its first byte in the memory, how many rows it has.
        dims: int32 [F + 1], where the numbers of each feature begin in a row of the output.
        ids: int32 or int64 [N]. offsets: int32 or int64 [F * B + 1]. weights: float32 [N], or None.
        pooling: FBGEMM's PoolingMode.

    Raises:
        RuntimeError: an id outside of its table, or a description that does not fit the memory.
    """
    starts, places_, rows_ = dims.tolist(), places.tolist(), rows.tolist()
    if (types != INT8).any() or offsets[0] != 0 or (pooling == NONE and offsets[-1] != ids.shape[0]):
        raise RuntimeError("fxopt.table_batched: expected tables of 8 bits, and offsets of these ids")
    found = []
    for f, part in enumerate(offsets[:-1].view(len(places_), -1)):
        D = starts[f + 1] - starts[f]
        stride = -(-(D + _HEADER) // alignment) * alignment
        table = memory[places_[f] : places_[f] + rows_[f] * stride].view(rows_[f], stride)
        scale, low = table[:, :_HEADER].clone().view(torch.float16).float().split(1, 1)
        end = offsets[(f + 1) * part.shape[0]]
        mine = slice(int(part[0]) if len(part) else 0, int(end) if len(part) else 0)
        if not bool(((ids[mine] >= 0) & (ids[mine] < rows_[f])).all()):
            raise RuntimeError("fxopt.table_batched: an id outside of its table")
        values = table[:, _HEADER : _HEADER + D].float() * scale + low
        if pooling == NONE:
            found.append(values[ids[mine].long()])
            continue
        given = None if weights is None else weights[mine]
        sums = F.embedding_bag(ids[mine], values, part - part[:1], mode="sum", per_sample_weights=given)
        lengths = torch.cat([part, end.view(1)]).diff().clamp(min=1).view(-1, 1)
        found.append(sums / lengths if pooling == MEAN else sums)
    return torch.cat(found, 0 if pooling == NONE else 1)


def call_of(pooling: int, alignment: int) -> Callable[..., Tensor]:
    """The operator for one plan, past the dispatcher where it can be."""
    plan, past_dispatcher = torch.tensor([pooling, alignment], device="cpu"), OPERATORS.past_dispatcher("table_batched")

    def fxopt_table_batched(*given: Tensor) -> Tensor:
        outputs = past_dispatcher(*given[:8], plan)
        return torch.ops.fxopt.table_batched(*given) if outputs is None else outputs[0]

    return fxopt_table_batched


def _fake(
    memory: Tensor, types: Tensor, places: Tensor, rows: Tensor, dims: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int, alignment: int,
) -> Tensor:  # fmt: skip
    size = torch.library.get_ctx().new_dynamic_size()
    return memory.new_empty((ids.shape[0] if pooling == NONE else size, size), dtype=torch.float32)


OPERATORS = Operators((Operator(_SCHEMA, table_batched, _fake),), KERNEL)
