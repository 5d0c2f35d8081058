"""Rows in 8 bits on CUDA, through the shim."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, PerRow, Plan, Source
from fxopt.kernels.columns.quantized import dequantized, quantized

DIMS = (1, 3, 8, 12, 16, 33, 64, 144)  # by single codes, by four of them, in chunks of 16


def tables(rows: int) -> list[torch.Tensor]:
    return [quantized(torch.randn(rows, D) * torch.rand(rows, 1) * 10) for D in DIMS]


def moved(table: torch.Tensor) -> torch.Tensor:
    """On the GPU, its rows as far from each other as they were."""
    return torch.empty_strided(table.shape, table.stride(), dtype=table.dtype, device="cuda").copy_(table)


def plan(dtype: str, **how: object) -> Plan:
    """A column a table, side by side, the ids of all of them in tensor 0."""
    ends = torch.tensor(DIMS).cumsum(0).tolist()
    columns = (Column(Source(0), t, 0, end - D, **how) for t, (D, end) in enumerate(zip(DIMS, ends, strict=True)))
    return Plan(tuple(columns), (ends[-1],), (dtype,))


@pytest.mark.parametrize("rows", [0, 1, 33, 150])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_lookups(shim, rows, dtype):
    made, ids = tables(50), torch.randint(-(10**6), 10**6, (rows,))
    for program in ((Instr(Op.REMAINDER, "int64", 50),), (Instr(Op.ABS, "int64"), Instr(Op.REMAINDER, "int64", 50))):
        wanted = plan(dtype, program=program)
        (found,) = shim.run([ids], made, wanted)
        (expected,) = reference.columns([ids], made, wanted)
        assert torch.equal(found, expected) and shim.failure() == ""


@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", ["plain", "weights", "padding"])
def test_bags(shim, pool, how):
    if pool == "max" and how == "weights":
        pytest.skip("maxima take no weights")
    made, ids = tables(50), torch.randint(0, 50, (400,))
    offsets = torch.tensor([0, 0, 1, 40, 40, 390, 400])
    more = {"weights": {"weights": Source(2)}, "padding": {"padding": 7}, "plain": {}}[how]
    wanted = plan("float32", pool=pool, bag=Offsets(1, include_last=True), **more)
    tensors = [ids, offsets, torch.randn(400)]
    (found,) = shim.run(tensors, made, wanted)
    (expected,) = reference.columns(tensors, made, wanted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if pool == "max":
        assert torch.equal(found, expected)


@pytest.mark.parametrize("pool", ["sum", "max"])
def test_padded_rows(shim, pool):
    made, ids = tables(50), torch.randint(0, 50, (9, 20))
    masked = {"lengths": PerRow(Source(1)), "masked": "filled", "masked_value": 3.0 if pool == "max" else 0.0}
    ends = plan("float32").columns
    columns = tuple(Column(Source(0, lane=1), c.table, 0, c.offset, pool=pool, **masked) for c in ends)
    wanted, tensors = Plan(columns, (sum(DIMS),), ("float32",)), [ids, torch.randint(0, 21, (9,))]
    (found,) = shim.run(tensors, made, wanted)
    (expected,) = reference.columns(tensors, made, wanted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_that_lie_at_odd_places(shim):
    """A contiguous copy has no aligned rows: slower, and the same."""
    made, ids = [table.contiguous() for table in tables(50)], torch.randint(0, 50, (40,))
    assert all(table.stride(0) == D + 8 for table, D in zip(made, DIMS, strict=True))
    for how in ({}, {"pool": "sum", "bag": Offsets(1)}):
        tensors = [ids, torch.tensor([0, 3, 20])]
        (found,) = shim.run(tensors, made, plan("float32", **how))
        (expected,) = reference.columns(tensors, [dequantized(t) for t in made], plan("float32", **how))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_bad_id_is_never_followed(shim):
    (found,) = shim.run([torch.tensor([3, 50])], tables(50), plan("float32"))
    assert "row=1 lane=0 value=50 rows=50" in shim.failure()
    assert found[1].isnan().all() and not found[0].isnan().any()
