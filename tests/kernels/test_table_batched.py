"""fxopt::table_batched: its definition in PyTorch on every instruction set, and FBGEMM's own numbers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fxopt.kernels.table_batched import op

HEADER, SUM, MEAN, NONE = 4, 0, op.MEAN, op.NONE


def table(dim: int, type: int, alignment: int) -> Tensor:
    bits = op.BITS[type]
    header, numbers = HEADER * (bits <= 8), dim * bits // 8
    rows = torch.randint(0, 256, (random.randint(1, 30), -(-(header + numbers) // alignment) * alignment)).byte()
    rows[:, :header] = (torch.rand(len(rows), header // 2) - 0.5).half().view(torch.uint8)
    if not header:
        rows[:, :numbers] = torch.randn(len(rows), dim).to(torch.half if bits == 16 else torch.float).view(torch.uint8)
    return rows


def call(
    dims: list[int], batch: int, pooling: int, alignment: int = 1, dtype: torch.dtype = torch.int64, types: tuple = (2,)
) -> list[Any]:
    """Arguments of the operator; the last feature reads the first one's table. Types take turns."""
    types = [types[k % len(types)] for k in range(len(dims))]
    tables, places = [], []
    for dim, type in zip(dims, types, strict=True):
        places.append(sum(map(torch.numel, tables)))
        tables.append(table(dim, type, alignment))
    dims, places, counts = [*dims, dims[0]], [*places, 0], [*map(len, tables), len(tables[0])]
    lengths = torch.randint(0, 4, (len(dims), batch))
    ids = torch.cat([torch.randint(0, rows, (int(n.sum()),)) for rows, n in zip(counts, lengths, strict=True)])
    weights = torch.rand(len(ids)) if pooling == SUM else None
    return [
        torch.cat([table.flatten() for table in tables]),
        torch.tensor([*types, types[0]], dtype=torch.uint8),
        torch.tensor(places),
        torch.tensor(counts),
        torch.tensor([0, *dims]).cumsum(0).int(),
        ids.to(dtype),
        torch.cat([torch.zeros(1), lengths.flatten().cumsum(0)]).to(dtype),
        weights,
        pooling,
        alignment,
        dims[0] if pooling == NONE else sum(dims),
    ]


def run(given: list[Any]) -> Tensor:
    return op.call_of(*given[8:])(*given)


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("dim", [1, 15, 16, 64, 129, 300])
def test_is_its_definition(isa: None, pooling: int, dim: int) -> None:
    dims = [dim, dim] if pooling == NONE else [dim, 4, dim]
    for batch, (alignment, dtype) in itertools.product((1, 3, 400), ((1, torch.int64), (16, torch.int32))):
        given = call(dims, batch, pooling, alignment, dtype)
        torch.testing.assert_close(run(given), op.table_batched(*given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("types", [(0,), (1,), (3,), (4,), (3, 0, 1, 4, 2)])
def test_rows_of_any_bits(isa: None, types: tuple) -> None:
    for pooling, dim in itertools.product((SUM, MEAN, NONE), (4, 12, 20, 64, 132, 300)):
        dims = [dim] * 5 if pooling == NONE else [dim, 8, 60, dim, 24]
        for batch, alignment, dtype in ((3, 1, torch.int64), (20, 16, torch.int32)):
            given = call(dims, batch, pooling, alignment, dtype, types)
            torch.testing.assert_close(run(given), op.table_batched(*given), rtol=1e-5, atol=1e-4)


def test_a_wrong_width_is_refused(isa: None) -> None:
    given = call([8, 8], 4, SUM)
    for refusing in (run, lambda given: op.table_batched(*given)):
        with pytest.raises(RuntimeError, match=r"width|expected rows of 23"):
            refusing([*given[:-1], 23])


def test_codes_that_end_within_a_byte_are_refused(isa: None) -> None:
    with pytest.raises(RuntimeError, match="does not lie in its memory"):
        run(call([6, 6], 3, SUM, types=(4,)))


def test_no_bags_at_all(isa: None) -> None:
    assert run(call([3, 4], 0, SUM)).shape == (0, 10)


@pytest.mark.parametrize("id_", [-1, 10**6, 2**62])
def test_a_bad_id_is_refused(isa: None, id_: int) -> None:
    given = call([8, 8], 40, SUM)
    given[5][-1] = id_
    with pytest.raises(RuntimeError, match="outside of its table"):
        run(given)


@pytest.mark.parametrize("number", range(7))
def test_a_wrong_description_is_refused(isa: None, number: int) -> None:
    given = call([8, 8], 4, SUM)
    memory, types, places, rows, _, ids, offsets = given[:7]
    wrong = [
        *(memory[:-1], torch.full_like(types, 5), places + 1, rows + 1),
        *(torch.tensor([0, 8, 8, 24], dtype=torch.int32), ids[:-1], offsets.flip(0)),
    ]
    assert len(ids)
    given[number] = wrong[number]
    given[7] = None
    with pytest.raises(RuntimeError):
        run(given)


def test_fbgemms_numbers() -> None:
    inference = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

    types = (SparseType.INT8, SparseType.INT4, SparseType.INT2, SparseType.FP16, SparseType.FP32)
    for pooling, type in itertools.product((PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE), types):
        specs = [(f"t{i}", 20, 24, type, EmbeddingLocation.HOST) for i in range(3)]
        theirs = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
            specs, pooling_mode=pooling, device="cpu", output_dtype=SparseType.FP32
        )
        theirs.fill_random_weights()
        lengths = torch.randint(0, 4, (3 * 5,))
        ids, offsets = torch.randint(0, 20, (int(lengths.sum()),)), torch.cat([lengths[:1] * 0, lengths.cumsum(0)])
        width = 24 if pooling == PoolingMode.NONE else 72
        memory = (theirs.weights_host, theirs.weights_tys, theirs.weights_offsets, theirs.rows_per_table)
        found = run([*memory, theirs.D_offsets, ids, offsets, None, int(pooling), theirs.row_alignment, width])
        torch.testing.assert_close(found, theirs(ids, offsets), equal_nan=True)
