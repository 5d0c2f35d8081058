"""Bags of rows that 16-byte chunks do not fit, and maxima, through the shim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Compare, Instr, Offsets, Op, Plan, Source
from tests.kernels.test_columns_random import same_bits

DIMS = (1, 2, 5, 10, 16, 18, 33, 130)  # fewer floats than a chunk, one or more left over, none, more chunks than lanes


def tables(rows: int = 50) -> list[torch.Tensor]:
    return [torch.randn(rows, D) for D in DIMS]


def plan(**how: object) -> Plan:
    ends = torch.tensor(DIMS).cumsum(0).tolist()
    columns = (
        Column(table=t, output=0, offset=end - D, **how) for t, (D, end) in enumerate(zip(DIMS, ends, strict=True))
    )
    return Plan(tuple(columns), (ends[-1],), ("float32",))


def jagged(pool: str, lengths: list[int], **how: object) -> tuple[list[torch.Tensor], list[torch.Tensor], Plan]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [torch.randint(0, 50, (int(offsets[-1]),)), offsets, torch.randn(int(offsets[-1]))]
    return tensors, tables(), plan(source=Source(0), pool=pool, bag=Offsets(1, include_last=True), **how)


CAST, ADDED = Instr(Op.CAST, "int64"), Instr(Op.ADD_TENSOR, "int64", tensor=1)
KEEP, REST = Instr(Op.KEEP, "int64", 3, compare=Compare.NE), Instr(Op.REMAINDER, "int64", 7)


def stepped(rows, lanes, dtype, program, pool, **how):
    """Padded ids that a few steps make, or one more than the kernel has code of its own for."""
    tensors = [torch.randint(0, 40, (rows, lanes)).to(dtype), torch.arange(lanes) % 9]
    if dtype == torch.float32:
        tensors[0] += torch.rand(rows, lanes) * 0.9
    return tensors, tables(), plan(source=Source(0, lane=1), pool=pool, program=program, **how)


def same_sums(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-4, equal_nan=True)


@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
@pytest.mark.parametrize("lengths", [[0], [1], [0, 3, 0, 70, 1, 8, 33], [5] * 40, [900, 2]], ids=len)
def test_jagged(shim, pool, lengths):
    tensors, rows, wanted = jagged(pool, lengths)
    same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])
    assert shim.failure() == ""


@pytest.mark.parametrize("weight", [Source(2), None])
def test_weights_and_padding(shim, weight):
    tensors, rows, wanted = jagged("sum", [0, 3, 40, 1], weights=weight, padding=7)
    same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])


@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
@pytest.mark.parametrize("ids", [(9, 1), (1, 5), (70, 3), (3, 900)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padded_with_gaps_between_the_ids(shim, pool, ids, dtype):
    B, L = ids
    tensors = [torch.randint(0, 50, (B, 2 * L), dtype=dtype)[:, ::2]]
    rows, wanted = tables(), plan(source=Source(0, lane=1), pool=pool)
    same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])


@pytest.mark.parametrize("program", [(ADDED,), (CAST,), (CAST, ADDED), (CAST, KEEP), (CAST, KEEP, ADDED), (CAST, REST)])
@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("rows", "lanes", "dtype"), [(3, 26, torch.int64), (70, 5, torch.int32), (2, 90, torch.float32)]
)
def test_padded_ids_after_a_few_steps(shim, program, pool, rows, lanes, dtype):
    how = {"masked": "lowered", "masked_value": 1e9} if pool == "max" and KEEP in program else {}
    if dtype == torch.float32 and program[0] is not CAST:
        program = (CAST, *program)
    arguments = stepped(rows, lanes, dtype, program, pool, **how)
    same_sums(shim.run(*arguments)[0], reference.columns(*arguments)[0])
    assert shim.failure() == ""


def test_a_bad_id_after_a_step(shim):
    tensors, rows, wanted = stepped(70, 26, torch.int64, (ADDED,), "sum")
    tensors[0][60, 25] = 49  # and 7 more
    (found,) = shim.run(tensors, rows, wanted)
    assert found.isnan().all(1).nonzero().tolist() == [[60]]
    assert "row=60 lane=25 value=56 rows=50" in shim.failure()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [9, 900])
def test_a_nan_wins_in_padded_rows_and_where_it_comes_first(shim, padded, length):
    tensors, rows, wanted = jagged("max", [length] * 4)
    if padded:
        tensors, wanted = [tensors[0].view(4, length)], plan(source=Source(0, lane=1), pool="max")
    for table in rows:
        table[3], table[4] = torch.nan, torch.inf
    ids = tensors[0].view(4, length)
    ids[ids == 3] = 5
    ids[0, 0] = ids[1, 1] = ids[2, -1] = 3  # and none in the last bag
    (found,) = shim.run(tensors, rows, wanted)
    assert same_bits(found, reference.columns(tensors, rows, wanted)[0])
    assert found.isnan().all(1).tolist() == [True, padded, padded, False]


@pytest.mark.parametrize("pool", ["sum", "max"])
@pytest.mark.parametrize("step", [0, 3])
def test_jagged_ids_with_gaps_and_one_id_many_times(shim, pool, step):
    tensors, rows, wanted = jagged(pool, [2, 0, 5, 1] * 200)  # so many short bags go by runs
    tensors[0] = torch.as_strided(torch.randint(0, 50, (3 * len(tensors[0]),)), tensors[0].shape, (step,))
    same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])


def test_maxima_of_another_dtype_and_on_top_of_others(shim):
    rows, tensors = [torch.randn(50, 18)], [torch.randint(0, 50, (30, 4))]
    column = Column(Source(0, lane=1), 0, 0, 0, pool="max")
    for columns, dtype in (((column,), "bfloat16"), ((column, replace(column, add=True)), "float32")):
        wanted = Plan(columns, (18,), (dtype,))
        same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])


def test_rows_of_a_wider_table(shim):
    """Where each begins says which loads fit, and not how wide it is alone."""
    wide, tensors = torch.randn(50, 21), [torch.randint(0, 50, (30, 4))]
    for first, width in ((1, 16), (4, 16), (0, 20)):
        column = Column(Source(0, lane=1), 0, 0, 0, pool="mean")
        wanted, rows = Plan((column,), (width,), ("float32",)), [wide[:, first : first + width]]
        same_sums(shim.run(tensors, rows, wanted)[0], reference.columns(tensors, rows, wanted)[0])


def test_a_bad_id_is_reported_and_never_followed(shim):
    for pool in ("sum", "max"):
        tensors, rows, wanted = jagged(pool, [4, 4, 4])
        tensors[0][5] = 10**6
        (found,) = shim.run(tensors, rows, wanted)
        assert found.isnan().all(1).tolist() == [False, True, False]
        assert "row=1 lane=1 value=1000000" in shim.failure()
