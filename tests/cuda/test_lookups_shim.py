"""Lookups through the shim: ids in one matrix of floats, ids that a tensor is added to, and rows that are converted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Instr, Op, PerRow, Plan, Source
from tests.cuda.test_copies_shim import assert_equal

TRUNCATE = (Instr(Op.CAST, "int64"),)
FIELDS = 5


def of_floats(rows, dims=(4, 1, 16, 5, 33), table_rows=40):
    """deepctr-torch's: every id is a column of one float32 matrix."""
    tensors = [torch.rand(rows, FIELDS) * table_rows - 0.5]  # what truncates to the first row, too
    tables = [torch.randn(table_rows, dim) for dim in dims]
    at = [sum(dims[:k]) for k in range(FIELDS + 1)]
    made = [Column(Source(0, fixed=((1, k),)), k, 0, at[k], TRUNCATE) for k in range(FIELDS)]
    return tensors, tables, Plan(tuple(made), (at[-1],), ("float32",))


def sequences(rows, dim=8):
    """Lanes [rows, 3] of such a matrix: as rows of an output of their own, as its lanes, and beside another column."""
    tensors, tables = [torch.rand(rows, 9) * 40], [torch.randn(40, dim)]
    three = {"start": 2, "length": 3, "lane": 1}
    made = (
        Column(Source(0, **three), 0, 0, 0, TRUNCATE),
        Column(Source(0, **three), 0, 1, 0, TRUNCATE),
        Column(Source(0, fixed=((1, 8),)), 0, 1, 3 * dim, TRUNCATE),
    )
    return tensors, tables, Plan(made, (3 * dim, 4 * dim), ("float32",) * 2)


def added(rows, dtype=torch.int64, cut=slice(None), dim=16, columns=1):
    """torchfm's: one table for all fields, each of which has its part of it."""
    tensors = [torch.randint(0, 9, (rows, FIELDS + 2)).to(dtype)[:, cut]]
    inner = tensors[0].shape[1]
    tensors.append(torch.arange(0, 9 * inner, 9))
    program = (Instr(Op.ADD_TENSOR, "int64", tensor=1),)
    made = [Column(Source(0, rows=(0, 1)), 0, 0, dim * c, program) for c in range(columns)]
    made.append(Column(Source(0, lane=1), 0, 1, 0, program))
    return tensors, [torch.randn(9 * inner, dim)], Plan(tuple(made), (dim * columns, dim * inner), ("float32",) * 2)


def beside(rows, program=(), dtype=torch.int64, dim=5):
    """Lanes of a matrix of ids in a row with others, so that they do not follow each other from row to row."""
    tensors = [torch.randint(0, 9, (rows, FIELDS + 2)).to(dtype)[:, 1:-1], torch.arange(0, 9 * FIELDS, 9)]
    made = (
        Column(Source(0, lane=1), 0, 0, 3, program),
        Column(Source(0, lane=1, start=2, length=3), 0, 0, 3 + dim * FIELDS),
    )
    tables, width = [torch.randn(9 * FIELDS, dim)], 4 + dim * (FIELDS + 3)
    copied = [Column(Source(2, lane=1), None, 0, 0), Column(Source(3, lane=1), None, 0, width - 1)]
    return [*tensors, torch.rand(rows, 3), torch.rand(rows, 1)], tables, Plan((*made, *copied), (width,), ("float32",))


def converted(rows, dim, table, out):
    """Of another dtype, transposed, added to each other, and divided."""
    tensors = [torch.randint(0, 40, (rows, 3)), torch.rand(rows) + 0.5]
    tables = [torch.randn(40, dim).to(table), torch.randn(dim, 40).to(table).T, torch.randn(40, dim).to(out)]
    ids = [Source(0, fixed=((1, k),)) for k in range(3)]
    made = (
        Column(ids[0], 0, 0, 0),
        Column(ids[1], 1, 0, dim),
        Column(ids[0], 2, 1, 0),
        Column(ids[1], 2, 1, 0, add=True),
        Column(ids[2], 2, 1, 0, add=True),
        Column(ids[2], 2, 2, 0, divisor=PerRow(Source(1))),
        Column(Source(0, lane=1), 2, 3, 0, (Instr(Op.XOR, "int64", 1),)),
        Column(ids[0], 2, 3, 3 * dim),
    )
    return tensors, tables, Plan(made, (2 * dim, dim, dim, 4 * dim), (str(out).removeprefix("torch."),) * 4)


@pytest.mark.parametrize("rows", [1, 31, 33, 200, 410])
@pytest.mark.parametrize("make", [of_floats, sequences, added, beside])
def test_equals_the_reference(shim, make, rows):
    assert_equal(shim, make(rows))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("cut", [slice(None), slice(1, -1), slice(0, None, 2)])
@pytest.mark.parametrize("rows", [2, 45])
def test_a_tensor_is_added_by_lane(shim, dtype, cut, rows):
    assert_equal(shim, added(rows, dtype, cut))


ADDED, REST = (Instr(Op.ADD_TENSOR, "int64", tensor=1),), (Instr(Op.REMAINDER, "int64", 7),)


@pytest.mark.parametrize("program", [(), ADDED, REST, (*REST, *ADDED)], ids=len)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("rows", [1, 45])
def test_lanes_beside_other_columns(shim, program, dtype, rows):
    assert_equal(shim, beside(rows, program, dtype))


@pytest.mark.parametrize("mode", ["raise", "clamp"])
def test_a_bad_id_of_such_a_lane(shim, mode):
    tensors, tables, plan = beside(45, ADDED)
    (expected,) = reference.columns(tensors, tables, plan)
    tensors[0][30, 4] = 9
    (found,) = shim.run(tensors, tables, replace(plan, bad_ids=mode))
    own = slice(3 + 4 * 5, 3 + 5 * 5)
    expected[30, own] = torch.nan if mode == "raise" else tables[0][-1]
    expected[30, 3 + 7 * 5 : 3 + 8 * 5] = tables[0][9]
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert ("column=0 row=30 lane=4 value=45 rows=45" in shim.failure()) == (mode == "raise")


@pytest.mark.parametrize(("rows", "inner"), [(45, 1), (1, 1), (7, 5)])
def test_a_tensor_is_added_to_the_same_ids_again(shim, rows, inner):
    ids, more = torch.tensor([[3]]).expand(rows, inner), torch.arange(inner)
    program = (Instr(Op.ADD_TENSOR, "int64", tensor=1),)
    made = (Column(Source(0, rows=(0, 1)), 0, 0, 0, program), Column(Source(0, lane=1), 0, 1, 0, program))
    assert_equal(shim, ([ids, more], [torch.randn(9, 4)], Plan(made, (4, 4 * inner), ("float32",) * 2)))


PROGRAMS = {
    "next": (Instr(Op.ADD, "int64", 1),),
    "clamped": (Instr(Op.CLAMP_MIN, "int64", 2), Instr(Op.CLAMP_MAX, "int64", 30)),
    "of 32 bits": (Instr(Op.REMAINDER, "int32", 7), Instr(Op.MUL, "int64", 2)),
    "roots": (
        Instr(Op.CAST, "float32"), Instr(Op.DIV, "float32", 3.0), Instr(Op.CLAMP_MIN, "float32", 1e-6),
        Instr(Op.SQRT, "float32"), Instr(Op.CAST, "int64"),
    ),
    "added in front": (Instr(Op.ADD_TENSOR, "int64", tensor=1), Instr(Op.CLAMP_MAX, "int64", 33)),
    "added behind": (Instr(Op.FLOOR_DIVIDE, "int64", 2), Instr(Op.ADD_TENSOR, "int64", tensor=1)),
}  # fmt: skip


def stepped(program, rows, dtype, dim=16):
    """A matrix of ids as rows, as lanes of rows, beside another column, and a lane by itself, many times."""
    ids, more = torch.randint(0, 24, (rows, 3)).to(dtype), torch.arange(3)
    made = [
        Column(Source(0, rows=(0, 1)), 0, 0, 0, program),
        Column(Source(0, lane=1), 0, 1, 0, program),
        Column(Source(0, lane=1), 0, 2, 0, program),
        Column(Source(0, fixed=((1, 2),)), 0, 2, 3 * dim, PROGRAMS["next"]),
    ]
    made += [Column(Source(0, fixed=((1, 1),)), 0, 3, dim * k, PROGRAMS["next"]) for k in range(20)]
    plan = Plan(tuple(made), (dim, 3 * dim, 4 * dim, 20 * dim), ("float32",) * 4)
    return [ids, more], [torch.randn(40, dim)], plan


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.int16])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rows", [1, 45, 300])
def test_ids_by_any_program(shim, divides_as_cuda, rows, program, dtype):
    tensors, tables, plan = stepped(PROGRAMS[program], rows, dtype)
    if dtype is torch.float32:
        plan = replace(plan, columns=tuple(replace(c, program=(*TRUNCATE, *c.program)) for c in plan.columns))
    assert_equal(shim, (tensors, tables, plan))


@pytest.mark.parametrize("mode", ["raise", "clamp"])
def test_a_program_gives_a_bad_id(shim, mode):
    ids, table = torch.randint(0, 39, (300,)), torch.randn(40, 8)
    plan = Plan((Column(Source(0), 0, 0, 0, PROGRAMS["next"]),), (8,), ("float32",))
    (expected,) = reference.columns([ids], [table], plan)
    ids[171] = 39
    (found,) = shim.run([ids], [table], replace(plan, bad_ids=mode))
    expected[171] = torch.nan if mode == "raise" else table[39]
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert ("column=0 row=171 lane=0 value=40 rows=40" in shim.failure()) == (mode == "raise")


@pytest.mark.parametrize("program", [(), (Instr(Op.ADD, "int64", -9),)], ids=len)
@pytest.mark.parametrize("lanes", [1, 3])
def test_ids_from_the_end(shim, program, lanes):
    ids, table = torch.randint(-9, 9, (200, lanes)), torch.randn(40, 8)
    source = Source(0, rows=(0, 1)) if lanes == 1 else Source(0, lane=1)
    column = Column(source, 0, 0, 0, program, wrap_negative=True)
    assert_equal(shim, ([ids], [table], Plan((column,), (8 * lanes,), ("float32",))))


def test_whole_ids_that_are_cast(shim):
    tensors, tables, plan = of_floats(77)
    assert_equal(shim, ([tensors[0].abs().int()], tables, plan))


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 70])
@pytest.mark.parametrize(
    ("table", "out"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("rows", [1, 40])
def test_converted_rows(shim, divides_as_cuda, dim, table, out, rows):
    assert_equal(shim, converted(rows, dim, table, out))


@pytest.mark.parametrize("value", [-1.0, 40.0, 1e20, float("nan"), -float("inf")])
def test_floats_that_are_no_ids(shim, value):
    tensors, tables, plan = of_floats(200)
    expected = shim.run(tensors, tables, plan)[0].clone()
    tensors[0][150, 2] = value
    expected[150, 5:21] = torch.nan
    (found,) = shim.run(tensors, tables, plan)
    assert "fxopt-bad-id column=2 row=150 lane=0" in shim.failure()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_clamped_floats(shim):
    tensors, tables, plan = of_floats(200)
    tensors[0][[0, 150, 199], 1] = torch.tensor([-3.0, 40.0, 99.0])
    (found,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    (expected,) = reference.columns([tensors[0].clamp(0, 39)], tables, plan)
    assert shim.failure() == "" and torch.equal(found, expected)


def test_an_id_that_the_added_tensor_moves_out_of_the_table(shim):
    tensors, tables, plan = added(45)
    tensors[0][30, 6] = 9
    shim.run(tensors, tables, Plan(plan.columns[:1], plan.widths[:1], plan.dtypes[:1]))
    assert f"column=0 row={30 * 7 + 6} lane=0 value=63 rows=63" in shim.failure()
    lanes = replace(plan.columns[1], output=0)
    shim.run(tensors, tables, Plan((lanes,), plan.widths[1:], plan.dtypes[1:]))
    assert "column=0 row=30 lane=6 value=63 rows=63" in shim.failure()


def test_many_columns_of_floats_are_tiles(shim):
    tensors, tables, _ = of_floats(1090, dims=(8,) * FIELDS)
    made = [Column(Source(0, fixed=((1, k % FIELDS),)), k % FIELDS, 0, 8 * k, TRUNCATE) for k in range(203)]
    assert_equal(shim, (tensors, tables, Plan(tuple(made), (8 * 203,), ("float32",))))


@pytest.mark.parametrize("cut", [slice(None), slice(1, -1)])
def test_many_columns_of_ids_with_an_inner_dim(shim, cut):
    assert_equal(shim, added(220, cut=cut, dim=8, columns=203))
    tensors, tables, plan = added(220, cut=cut, dim=8, columns=203)
    made = tuple(replace(column, program=()) for column in plan.columns)
    assert_equal(shim, (tensors, tables, replace(plan, columns=made)))
