"""Bags of few ids as one run of ids, through the shim: the bits of sums in order; long bags and broken ones, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source
from tests.cuda.test_clamped_shim import counted

ROWS, TABLE_ROWS = 1061, 40  # more than warps wait for on the shim's device, and no item of them is full


def short(dim=8, most=6, dtype=torch.int64, include_last=True, pool="sum", rows=ROWS, **more):
    """A column of bags of 0 to `most` ids."""
    lengths = torch.randint(0, most + 1, (rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    ids = torch.randint(0, TABLE_ROWS, (int(offsets[-1]),)).to(dtype)
    bag = Offsets(1, include_last=include_last)
    plan = Plan((Column(Source(0), 0, 0, 0, pool=pool, bag=bag, **more),), (dim,), ("float32",))
    return [ids, offsets if include_last else offsets[:-1]], [torch.randn(TABLE_ROWS, dim)], plan


LONGER = {0: 17, 3: 300, 4: 65, 5: 64, 700: 16, ROWS - 1: 25}
APART = [3, 4]  # longer than 64: added in another order


def with_long_ones(dim=8, rows=ROWS):
    tensors, tables, plan = short(dim, rows=rows)
    lengths = tensors[1].diff()
    lengths[list(LONGER)] = torch.tensor(list(LONGER.values()))
    tensors[1][1:] = lengths.cumsum(0)
    tensors[0] = torch.randint(0, TABLE_ROWS, (int(tensors[1][-1]),))
    return tensors, tables, plan


def in_order(tensors, tables, plan):
    ids, offsets = (t.tolist() for t in tensors)
    found = torch.zeros(ROWS, tables[0].shape[1])
    for row in range(ROWS):
        for k in ids[offsets[row] : offsets[row + 1] if row + 1 < len(offsets) else None]:
            found[row] += tables[0][k]
    return found


@pytest.mark.parametrize("dim", [4, 8, 12, 32, 64, 128])
@pytest.mark.parametrize(("dtype", "include_last"), [(torch.int64, True), (torch.int32, False)])
def test_sums_have_the_bits_of_sums_in_order(shim, dim, dtype, include_last):
    call = short(dim, dtype=dtype, include_last=include_last)
    found, again = (shim.run(*call, seed)[0] for seed in (1, 2))
    assert torch.equal(found, in_order(*call)) and torch.equal(found, again)


@pytest.mark.parametrize("dim", [8, 12, 128])
def test_long_bags_among_short_ones(shim, dim):
    tensors, tables, plan = with_long_ones(dim)
    (found,) = shim.run(tensors, tables, plan)
    expected = in_order(tensors, tables, plan)
    torch.testing.assert_close(found[APART], expected[APART], rtol=1e-5, atol=1e-5)
    found[APART] = expected[APART]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("empty_nan", [False, True])
def test_means(shim, empty_nan):
    tensors, tables, plan = short(pool="mean", empty_nan=empty_nan)
    (found,) = shim.run(tensors, tables, plan)
    torch.testing.assert_close(found, reference.columns(tensors, tables, plan)[0], equal_nan=True)


def test_a_bad_id_makes_its_bag_nan_and_is_reported(shim):
    tensors, tables, plan = short()
    row = 500 + int(tensors[1].diff()[500:].argmax())
    at = int(tensors[1][row]) + 4
    tensors[0][at] = TABLE_ROWS + 3
    (found,) = shim.run(tensors, tables, plan)
    assert f"fxopt-bad-id column=0 row={row} lane=4 value=43 rows=40" in shim.failure()
    assert found.isnan().any(1).nonzero().flatten().tolist() == [row]


@pytest.mark.parametrize("dim", [8, 12])
def test_clamp_counts_an_id_once_and_leaves_other_bags_alone(shim, dim):
    tensors, tables, plan = short(dim)
    tensors[0][[5, 1000]] = torch.tensor([-2, 99])
    assert counted(shim, tensors, tables, plan) == 2
    (found,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    expected = in_order([tensors[0].clamp(0, TABLE_ROWS - 1), tensors[1]], tables, plan)
    with_bad_ids = torch.bucketize(torch.tensor([5, 1000]), tensors[1], right=True) - 1
    torch.testing.assert_close(found[with_bad_ids], expected[with_bad_ids])
    found[with_bad_ids] = expected[with_bad_ids]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("change", [(0, 1), (40, 0), (41, 10**6), (700, -1)])
def test_broken_offsets_are_reported(shim, change):
    tensors, tables, plan = short()
    tensors[1][change[0]] = change[1]
    (found,) = shim.run(tensors, tables, plan)
    assert "expected them to start at 0" in shim.failure()
    rows = found.isnan().all(1).nonzero().flatten().tolist()
    assert rows and set(rows) <= {change[0] - 1, change[0]}
