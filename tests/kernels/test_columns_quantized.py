"""Tables in 8 bits: what the format holds, and the kernel on it against the same rows as floats, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import grouped, op, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Offsets, PerRow, Plan, Source
from fxopt.kernels.columns.quantized import NotFinite, dequantized, dim_of, quantized

DIMS = (1, 3, 7, 8, 10, 16, 24, 32, 33, 64, 128, 130)


def table(rows: int, dim: int) -> torch.Tensor:
    return torch.randn(rows, dim) * torch.rand(rows, 1) * 10


def outputs(tensors, tables, plan):
    return op.columns(tensors, tables, encode(plan))[0]


def same(tensors, made, plan):
    """What the kernel gives on codes is what it gives on their values; returns it."""
    found = outputs(tensors, [made], plan)
    assert torch.equal(found, outputs(tensors, [dequantized(made)], plan))
    return found


@pytest.mark.parametrize("dim", DIMS)
def test_values_are_off_by_half_a_step_of_their_row(dim):
    weight = table(300, dim)
    weight[7], weight[8], weight[9] = 0.0, 3.25, 1e-42
    made = quantized(weight)
    assert made.shape == (300, dim + 8) and dim_of(made) == dim
    assert made.stride(0) % (16 if dim % 16 == 0 else 4) == 0
    found, step = dequantized(made), (weight.amax(1) - weight.amin(1)) / 255
    assert ((found - weight).abs() <= 0.505 * step[:, None] + 1e-6 * weight.abs()).all()
    assert torch.equal(found[7:9], weight[7:9])  # rows of one value, padding above all, stay what they are
    assert torch.equal(found.amin(1), weight.amin(1))
    assert torch.equal(dequantized(made.clone().contiguous()), found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_rows_without_a_scale_are_refused(value):
    weight = table(70_000, 8)
    weight[69_999, 3] = value
    weight[69_999, 4] = -1e38
    with pytest.raises(NotFinite):
        quantized(weight)


def test_of_no_rows():
    made = quantized(torch.empty(0, 16))
    assert made.shape == (0, 24) and dequantized(made).shape == (0, 16)


@pytest.mark.parametrize("dim", DIMS)
def test_lookups(isa, dim):
    made = quantized(table(90, dim))
    for rows in (0, 1, 70):
        ids = torch.randint(0, 90, (rows, 3))
        for dtype in ("float32", "float64", "bfloat16"):
            plan = Plan((Column(Source(0, lane=1), 0, 0, 0),), (3 * dim,), (dtype,))
            assert torch.equal(same([ids], made, plan), reference.columns([ids], [made], plan)[0])
            assert torch.equal(grouped.columns([ids], [made], plan)[0], reference.columns([ids], [made], plan)[0])
    wide = Plan((Column(Source(0, lane=1), 0, 0, 0),), (None,), ("float32",))
    assert outputs([ids], [made], wide).shape == (70, 3 * dim)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
def test_bags(isa, dim, pool):
    made, ids = quantized(table(90, dim)), torch.randint(0, 90, (500,))
    offsets = torch.tensor([0, 0, 1, 60, 60, 460, 500])
    for more in ({}, {"weights": Source(2)}, {"padding": 4}):
        if "weights" in more and pool == "max":
            continue
        plan = Plan((Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1, True), **more),), (dim,), ("float32",))
        tensors = [ids, offsets, torch.randn(500)]
        torch.testing.assert_close(same(tensors, made, plan), reference.columns(tensors, [made], plan)[0])
    with pytest.raises(RuntimeError, match="value=90 rows=90"):
        outputs([torch.full((500,), 90), offsets], [made], plan)


@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
def test_padded_rows(isa, pool):
    made, ids = quantized(table(90, 33)), torch.randint(0, 90, (9, 70))
    fill = {"masked": "filled", "masked_value": 3.0 if pool == "max" else 0.0}
    for more in ({}, {"lengths": PerRow(Source(1)), **fill}):
        plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool=pool, **more),), (33,), ("float32",))
        tensors = [ids, torch.randint(0, 71, (9,))]
        torch.testing.assert_close(same(tensors, made, plan), reference.columns(tensors, [made], plan)[0])


@pytest.mark.parametrize("dim", [8, 16, 64, 128])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_bags_of_bfloat16_rows(isa, dim, pool):
    rows = table(90, dim).bfloat16()
    plan = Plan((Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1)),), (dim,), ("float32",))
    tensors = [torch.randint(0, 90, (500,)), torch.tensor([0, 0, 1, 60, 460])]
    assert torch.equal(outputs(tensors, [rows], plan), outputs(tensors, [rows.float()], plan))


def test_a_table_of_bytes_that_holds_no_rows():
    plan = Plan((Column(Source(0), 0, 0, 0),), (None,), ("float32",))
    with pytest.raises(RuntimeError, match="expected rows of codes"):
        outputs([torch.zeros(2, dtype=torch.int64)], [torch.zeros(3, 7, dtype=torch.uint8)], plan)
