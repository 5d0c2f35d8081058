"""Padded rows of which some lanes count: rows that are not read still tell what eager would, and ids are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import op, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Compare, Instr, Offsets, Op, PerRow, Plan, Source

NOT_ZERO = Instr(Op.KEEP, "int64", 0, compare=Compare.NE)
BY_IDS = Column(Source(0, lane=1), 0, 0, 0, pool="sum", program=(NOT_ZERO,))
BY_LENGTH = Column(Source(0, lane=1), 0, 0, 0, pool="sum", lengths=PerRow(Source(1)))
MAX = {"pool": "max", "masked": "lowered", "masked_value": 1e9}


def plan_of(column, dim):
    return Plan((column,), (dim,), ("float32",))


def both(column, ids, lengths, table):
    tensors, plan = [ids, lengths], plan_of(column, table.shape[1])
    (expected,) = reference.columns(tensors, [table], plan)
    (found,) = op.columns(tensors, [table], encode(plan))
    return found, expected


def padded(rows, lanes, n, padding="zeros"):
    lengths = torch.randint(0, lanes + 1, (rows,))
    ids, behind = torch.randint(1, n, (rows, lanes)), torch.arange(lanes) >= lengths[:, None]
    return (ids if padding == "random" else ids.masked_fill(behind, 0)), lengths


@pytest.mark.parametrize("lanes", [1, 50, 256, 700])
@pytest.mark.parametrize("dim", [1, 16, 33, 130])
@pytest.mark.parametrize("padding", ["zeros", "random"])
@pytest.mark.parametrize("rows", [30, 30_000])  # of the table: within the cache, and prefetched
def test_poolings(isa, rows, padding, dim, lanes):
    ids, lengths = padded(40, lanes, rows, padding)
    table = torch.randn(rows, dim)
    for column in (BY_IDS, BY_LENGTH):
        for more in ({}, {"masked": "filled"}, {"pool": "mean"}, MAX, {**MAX, "masked": "filled", "masked_value": 0.5}):
            found, expected = both(replace(column, **more), ids, lengths, table)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # sums of 700 in other orders
            if "max" in more.values():
                assert found.equal(expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -2e9, -6e8])
@pytest.mark.parametrize("column", [BY_IDS, BY_LENGTH, replace(BY_LENGTH, **MAX), replace(BY_IDS, **MAX)])
@pytest.mark.parametrize("padding", ["zeros", "random"])
def test_rows_that_are_not_read_for_nothing(isa, padding, column, value):
    ids, lengths = padded(60, 40, 9, padding)
    for row in (0, 5):
        table = torch.randn(9, 8)
        table[row, 3] = value
        found, expected = both(column, ids, lengths, table)
        torch.testing.assert_close(found, expected, equal_nan=True)
    table = torch.full((9, 8), -8e8)  # kept rows far below, too: nothing is out of sight
    found, expected = both(column, ids, lengths, table)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lane", [0, 3, 47, 255, 299])
@pytest.mark.parametrize("bad", [9, -1, 2**62])
def test_bad_ids_that_do_not_count(isa, bad, lane):
    keep = Instr(Op.KEEP, "int64", bad, compare=Compare.NE)
    for column, length in ((BY_LENGTH, lane), (replace(BY_IDS, program=(keep,)), 300)):
        ids, lengths = torch.randint(0, 9, (5, 300)), torch.full((5,), length)
        ids[2, lane] = bad
        with pytest.raises(RuntimeError) as expected:
            both_plan = plan_of(column, 8)
            reference.columns([ids, lengths], [torch.randn(9, 8)], both_plan)
        with pytest.raises(RuntimeError) as found:
            op.columns([ids, lengths], [torch.randn(9, 8)], encode(both_plan))
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_lanes(isa, rows):
    ids, lengths = torch.empty(rows, 0, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
    found, expected = both(BY_LENGTH, ids, lengths, torch.randn(9, 8))
    assert found.equal(expected) and found.shape == (rows, 8)


def test_counts_and_divisors(isa):
    ids, lengths = padded(50, 20, 9)
    cast, add = Instr(Op.CAST, "float32"), Instr(Op.ADD, "float32", 1e-8)
    at_least = Instr(Op.CLAMP_MIN, "int64", 1)
    for divisor in (PerRow(None), PerRow(None, (cast, add)), PerRow(None, (at_least,)), PerRow(Source(1), (cast, add))):
        for column in (BY_IDS, BY_LENGTH):
            found, expected = both(replace(column, divisor=divisor), ids, lengths, torch.randn(9, 8))
            torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "more",
    [
        {"pool": "none"},
        {"padding": 0},
        {"weights": Source(0, lane=1)},
        {"bag": Offsets(1), "source": Source(0)},
        {"masked": "lowered"},
        {"pool": "max"},
        {"masked": "filled", "masked_value": 1.0},
        {**MAX, "masked_value": torch.inf},
        {"lengths": PerRow(None)},
        {"divisor": PerRow(Source(1), (NOT_ZERO,))},
    ],
)
def test_plans_that_make_no_sense(more):
    with pytest.raises(ValueError, match="plan: column 0"):
        encode(plan_of(replace(BY_IDS, **more), 8))
