"""Copies of tensors as they lie, through the shim: expanded, sliced, wide; and ids that lie so."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Instr, Op, Plan, Source


def expanded(rows=9, inner=5, dim=64, dtype=torch.float32):
    """cat([query, keys, keys'], -1) of [B, T, D]: expanded over T, sliced in T and in D, and of T before B."""
    tensors = [
        torch.randn(rows, 1, dim).to(dtype).expand(rows, inner, dim),
        torch.randn(rows, inner + 3, dim + 4).to(dtype)[:, 2 : 2 + inner, :dim],
        torch.randn(inner, rows, dim).to(dtype).transpose(0, 1),
        torch.randn(1, 1, dim).to(dtype).expand(rows, inner, dim),
    ]
    made = [Column(Source(t, rows=(0, 1), lane=2), None, 0, t * dim) for t in range(4)]
    return tensors, [], Plan(tuple(made), (4 * dim,), (str(dtype).removeprefix("torch."),))


def wide(rows=37, dims=(515, 64, 2600), dtype=torch.float32):
    """Rows of many chunks beside each other; the second and third lie at multiples of 4 bytes only."""
    tensors = [torch.randn(rows, dim + 1).to(dtype)[:, :dim] for dim in dims]
    at = [sum(dims[:k]) for k in range(len(dims))]
    made = [Column(Source(k, lane=1), None, 0, at[k]) for k in range(len(dims))]
    return tensors, [], Plan(tuple(made), (sum(dims),), (str(dtype).removeprefix("torch."),))


def sliced_ids(op=None, rows=6, inner=7):
    """Ids [B, T] of a longer tensor, of T before B, and of one id for each T; written as rows and as lanes."""
    dtype = torch.float32 if op is Op.BUCKETIZE else torch.int64
    longer, swapped, one = (torch.randint(0, 40, shape).to(dtype) for shape in ((rows, 12), (inner, rows), (rows, 1)))
    tensors = [longer[:, 3 : 3 + inner], swapped.T, one.expand(rows, inner), torch.arange(0.0, 39.0)]
    program = {
        None: (),
        Op.BUCKETIZE: (Instr(Op.BUCKETIZE, "int64", 0, tensor=3),),
        Op.REMAINDER: (Instr(Op.REMAINDER, "int64", 23),),
    }[op]
    made = [Column(Source(t, rows=(0, 1)), 0, 0, 8 * t, program) for t in range(3)]
    lanes = [Column(Source(t, lane=1), 0, t + 1, 0, program) for t in range(3)]
    plan = Plan((*made, *lanes), (24, *(3 * [8 * inner])), ("float32",) * 4)
    return tensors, [torch.randn(41, 8)], plan


def assert_equal(shim, call, seed=0):
    tensors, tables, plan = call
    found, expected = shim.run(tensors, tables, plan, seed), reference.columns(tensors, tables, plan)
    assert shim.failure() == ""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "inner", "dim"), [(9, 5, 64), (1, 7, 8), (8, 1, 12), (70, 3, 5), (3, 43, 1)])
def test_strided_copies_equal_the_reference(shim, dtype, rows, inner, dim):
    assert_equal(shim, expanded(rows, inner, dim, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 31, 45, 133])
def test_wide_copies_equal_the_reference(shim, dtype, rows):
    assert_equal(shim, wide(rows, dtype=dtype))


def test_a_row_of_more_chunks_than_pieces_of_the_usual_size(shim):
    assert_equal(shim, wide(3, dims=(40_001, 7)))


def test_a_wide_copy_that_others_are_added_to(shim):
    tensors = [torch.randn(5, 33_000), torch.randn(5, 33_000)]
    made = (Column(Source(0, lane=1), None, 0, 0), Column(Source(1, lane=1), None, 0, 0, add=True))
    assert_equal(shim, (tensors, [], Plan(made, (33_000,), ("float32",))))


@pytest.mark.parametrize("op", [None, Op.BUCKETIZE, Op.REMAINDER])
@pytest.mark.parametrize(("rows", "inner"), [(6, 7), (40, 7), (1, 3)])
def test_ids_of_any_strides(shim, op, rows, inner):
    assert_equal(shim, sliced_ids(op, rows, inner))


def test_bad_ids_of_a_sliced_tensor_are_named_by_row_and_lane(shim):
    tensors, tables, plan = sliced_ids()
    tensors[0][4, 5] = 41
    shim.run(tensors, tables, Plan((plan.columns[0],), (8,), ("float32",)))
    assert "column=0 row=33 lane=0 value=41 rows=41" in shim.failure()
    shim.run(tensors, tables, Plan((Column(Source(0, lane=1), 0, 0, 0),), (56,), ("float32",)))
    assert "column=0 row=4 lane=5 value=41 rows=41" in shim.failure()


@pytest.mark.parametrize("rows", [20, 70, 410, 1000])
def test_lookups_of_few_and_many_chunks(shim, rows):
    """Rows of 1 to 9 chunks, where a warp takes one, two and four groups of 32 positions."""
    tensors = [torch.randint(0, 30, (rows,))]
    dims = (1, 4, 12, 36, 20)
    tables = [torch.randn(30, dim) for dim in dims]
    made = [Column(Source(0), k, k, 0) for k in range(len(dims))]
    assert_equal(shim, (tensors, tables, Plan(tuple(made), dims, ("float32",) * len(dims))))
