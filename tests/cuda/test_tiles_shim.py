"""Tiles of many narrow columns, through the shim: the bits of a column alone, and what becomes of bad ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels import reports
from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, Plan, Source
from tests.cuda.shim_library import ShimError
from tests.cuda.test_clamped_shim import counted

COLUMNS, ROWS = 203, 1090  # just enough, and neither fills its last tile
TABLE_ROWS = 60


def narrow(dim=8, dtype=torch.float32, columns=COLUMNS, rows=ROWS):
    """Columns of all ways that tiles know, in turn, and a bag, which reads the second way's ids."""
    tensors = [
        torch.rand(rows, 2),
        torch.randint(0, TABLE_ROWS, (rows,), dtype=torch.int32),
        torch.randint(0, TABLE_ROWS, (rows, 3)),
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.rand(TABLE_ROWS - 1).sort().values,
        torch.rand(TABLE_ROWS - 1),
        torch.arange(rows),
    ]
    ways = (
        (Source(0, fixed=((1, 1),)), (Instr(Op.BUCKETIZE, "int64", 0, tensor=4),)),
        (Source(1), ()),
        (Source(2, fixed=((1, 2),)), ()),
        (Source(3), (Instr(Op.REMAINDER, "int64", TABLE_ROWS),)),
        (Source(0, fixed=((1, 0),)), (Instr(Op.BUCKETIZE, "int64", 1, tensor=5),)),
    )
    tables = [torch.randn(TABLE_ROWS, dim).to(dtype) for _ in range(3)]
    made = [Column(ways[c % 5][0], c % 3, 0, dim * c, ways[c % 5][1]) for c in range(columns)]
    made.append(Column(Source(1), 0, 0, dim * columns, pool="sum", bag=Offsets(6)))
    return tensors, tables, Plan(tuple(made), (dim * (columns + 1),), (str(dtype).removeprefix("torch."),))


@pytest.mark.parametrize(
    ("dim", "dtype"), [(8, torch.float32), (4, torch.float32), (16, torch.float32), (8, torch.float16)]
)
def test_equals_the_reference(shim, dim, dtype):
    tensors, tables, plan = narrow(dim, dtype)
    (found,) = shim.run(tensors, tables, plan)
    (expected,) = reference.columns(tensors, tables, plan)
    assert shim.failure() == "" and torch.equal(found, expected)


def test_every_schedule_gives_the_same_bits(shim):
    tensors, tables, plan = narrow()
    first, *others = (shim.run(tensors, tables, plan, seed)[0] for seed in range(3))
    assert all(torch.equal(first, other) for other in others)


def test_the_first_bad_id_is_reported_and_never_followed(shim):
    tensors, tables, plan = narrow()
    expected = shim.run(tensors, tables, plan)[0].clone()
    tensors[1][[700, 41]] = torch.tensor([-1, 60], dtype=torch.int32)
    columns = [*range(1, COLUMNS, 5), COLUMNS]
    expected.view(ROWS, -1, 8)[torch.tensor([[41], [700]]), torch.tensor(columns)] = float("nan")
    (found,) = shim.run(tensors, tables, plan)
    assert "fxopt-bad-id column=1 row=41 lane=0 value=60 rows=60" in shim.failure()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_clamp_takes_the_nearest_row_and_counts_it_once(shim):
    tensors, tables, plan = narrow()
    tensors[1][[0, 41, ROWS - 1]] = torch.tensor([-5, 60, 99], dtype=torch.int32)
    clamped = [*tensors]
    clamped[1] = tensors[1].clamp(0, TABLE_ROWS - 1)
    (expected,) = shim.run(clamped, tables, plan)
    (found,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    assert torch.equal(found, expected)
    assert counted(shim, tensors, tables, plan) == 3 * len([*range(1, COLUMNS, 5), COLUMNS])


def test_rows_that_a_graph_pads_do_not_count(shim, monkeypatch):
    tensors, tables, plan = narrow()
    tensors[1][:] = TABLE_ROWS
    monkeypatch.setattr(reports, "_kernels", [shim.library])
    real_rows = torch.tensor([7])
    pointer = shim._name(real_rows)
    with reports.padded(real_rows, ROWS):
        assert counted(shim, tensors, tables, plan) == 7 * len([*range(1, COLUMNS, 5), COLUMNS])
    shim.library.shim_forget(pointer)


def test_unchecked_follows_the_id(shim):
    tensors, tables, plan = narrow()
    tensors[2][5, 2] = 10**6
    with pytest.raises(ShimError, match="a load outside every tensor"):
        shim.run(tensors, tables, replace(plan, bad_ids="unchecked"))


def test_a_table_without_rows(shim):
    tensors, tables, plan = narrow()
    tables[1] = tables[1][:0]
    shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    assert "fxopt-bad-id column=1 row=0" in shim.failure()


def test_fewer_columns_or_rows_are_no_tiles(shim):
    for how in ({"columns": 199}, {"rows": 1023}):
        tensors, tables, plan = narrow(**how)
        (found,) = shim.run(tensors, tables, plan)
        assert torch.equal(found, reference.columns(tensors, tables, plan)[0])
