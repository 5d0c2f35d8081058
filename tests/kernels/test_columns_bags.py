"""Bags in one loop over ids: bit for bit F.embedding_bag, in any shape, and safe for any id and any offsets."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fxopt.kernels.columns import op, reference
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, Plan, Source

DIMS = (4, 8, 10, 16, 32, 48, 64, 96, 128, 256)
LENGTHS = (0, 1, 47, 48, 49, 0, 300, 5, 0)  # around the distance of the prefetch


def call_of(table, ids, offsets, pool="sum", **more):
    column = Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1, True), **more)
    plan = Plan((column,), (table.shape[1],), ("float32",))
    return [ids, offsets], [table], plan


def run(*args, **more):
    tensors, tables, plan = call_of(*args, **more)
    return op.columns(tensors, tables, encode(plan))[0]


def bags(lengths, rows, dtype=torch.int64):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randint(0, rows, (int(offsets[-1]),)).to(dtype), offsets.to(dtype)


@pytest.mark.parametrize("rows", [1, 50_000])  # within the cache, and prefetched
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("pool", ["sum", "mean"])
@pytest.mark.parametrize("dim", DIMS)
def test_bits_of_embedding_bag(isa, dim, pool, dtype, rows):
    table = torch.randn(rows, dim)
    for lengths in ((), (0,), (3,), LENGTHS, LENGTHS[::-1]):
        ids, offsets = bags(lengths, rows, dtype)
        found = run(table, ids, offsets, pool)
        expected = F.embedding_bag(ids, table, offsets, mode=pool, include_last_offset=True)
        if pool == "sum":
            assert found.equal(expected)
        torch.testing.assert_close(found, expected)
        assert found.equal(reference.columns(*call_of(table, ids, offsets, pool))[0])


@pytest.mark.parametrize("dim", [10, 64, 128])
def test_weights_and_strides(isa, dim):
    wide = torch.randn(50_000, 2 * dim)
    ids, offsets = bags(LENGTHS, 50_000)
    weights = torch.rand(len(ids))
    for table in (wide[:, :dim], wide[:, ::2]):
        assert run(table, ids, offsets).equal(
            F.embedding_bag(ids, table, offsets, mode="sum", include_last_offset=True)
        )
        assert run(table, ids.repeat_interleave(2)[::2], offsets).equal(run(table, ids, offsets))
    table = wide[:, :dim].contiguous()
    expected = F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    column = Column(Source(0), 0, 0, 0, pool="sum", bag=Offsets(1, True), weights=Source(2))
    plan = encode(Plan((column,), (dim,), ("float32",)))
    assert op.columns([ids, offsets, weights], [table], plan)[0].equal(expected)


LONG = (9_000, 3, 8_000, 300, 0, 20_000)  # beyond what is evaluated at a time


@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
@pytest.mark.parametrize("dim", [8, 10, 64])
def test_ids_behind_a_program(isa, dim, lengths):
    table, rows = torch.randn(50_000, dim), 50_000
    ids, offsets = bags(lengths, 4 * rows)
    program = (Instr(Op.ADD, "int64", -rows), Instr(Op.CLAMP_MIN, "int64", 0), Instr(Op.CLAMP_MAX, "int64", rows - 1))
    clamped = (ids - rows).clamp(0, rows - 1)
    assert run(table, ids, offsets, program=program).equal(run(table, clamped, offsets))
    with pytest.raises(RuntimeError, match="fxopt-bad-id column=0"):
        run(table, ids, offsets, program=program[:2])


def test_mean_of_nothing(isa):
    ids, offsets = bags((0, 2), 5)
    assert run(torch.randn(5, 64), ids, offsets, "mean")[0].eq(0).all()
    assert run(torch.randn(5, 64), ids, offsets, "mean", empty_nan=True)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_padded_mean_rounds_once(isa, dtype):
    """As torch's mean over a dim: 700 halves of 100 sum to more than a half holds, and their mean is 100."""
    table = (torch.rand(9, 33) + 100).to(dtype)
    ids = torch.randint(0, 9, (4, 700))
    plan = Plan(
        (Column(Source(0, lane=1), 0, 0, 0, pool="mean", empty_nan=True),), (33,), (str(dtype).removeprefix("torch."),)
    )
    expected = table[ids].mean(1)
    for (found,) in (op.columns([ids], [table], encode(plan)), reference.columns([ids], [table], plan)):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_a_mean_of_rows_of_2d_ids_rounds_twice(isa):
    """As nn.EmbeddingBag does, where the same sum is infinity."""
    table, ids = torch.full((9, 33), 100.0).half(), torch.randint(0, 9, (4, 700))
    plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool="mean"),), (33,), ("float16",))
    expected = F.embedding_bag(ids, table, mode="mean")
    for (found,) in (op.columns([ids], [table], encode(plan)), reference.columns([ids], [table], plan)):
        assert found.equal(expected)


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_features_back_to_back(isa, segment):
    """KeyedJaggedTensor's layout; a bad id of another feature is none of this one's."""
    ids, offsets = bags(LENGTHS, 50_000)
    table, rows = torch.randn(50_000, 64), len(LENGTHS) // 3
    mine = offsets[segment * rows : (segment + 1) * rows + 1]
    ids[: mine[0]] = -1
    ids[mine[-1] :] = 2**40
    expected = F.embedding_bag(ids[mine[0] : mine[-1]], table, mine - mine[0], mode="sum", include_last_offset=True)
    column = Column(Source(0), 0, 0, 0, pool="sum", bag=Offsets(1, True, segment, 3))
    (found,) = op.columns([ids, offsets], [table], encode(Plan((column,), (64,), ("float32",))))
    assert found.equal(expected)


@pytest.mark.parametrize("bad", [50_000, -1, 2**62, -(2**63)])
@pytest.mark.parametrize("dim", [8, 48, 64])
@pytest.mark.parametrize("position", [0, 1, 47, 48, 49, 100, 448, 449])
def test_bad_ids(isa, dim, position, bad):
    ids, offsets = bags(LENGTHS, 50_000)
    ids[position] = bad
    tensors, tables, plan = call_of(torch.randn(50_000, dim), ids, offsets)
    with pytest.raises(RuntimeError) as expected:
        reference.columns(tensors, tables, plan)
    with pytest.raises(RuntimeError) as found:
        op.columns(tensors, tables, encode(plan))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("offsets", [[0, 60, 50, 100], [0, 200, 300], [0, 100, 99], [0, 100, -1, 100], [5, 10, 20]])
def test_bad_offsets(isa, offsets):
    tensors, tables, plan = call_of(torch.randn(9, 64), torch.randint(0, 9, (100,)), torch.tensor(offsets))
    with pytest.raises(RuntimeError, match="offsets"):
        op.columns(tensors, tables, encode(plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pool", ["sum", "mean", "max"])
@pytest.mark.parametrize(("R", "D"), [(50, 1), (50, 40), (9_000, 16)])  # within the cache, and prefetched
def test_bags_of_one_id_have_eagers_bits(isa, R, D, pool, dtype):
    """As EmbeddingBag(x[:, i : i + 1]) does: a zero's sign is lost where it is added to zeros."""
    tables = [torch.randn(R, D, dtype=dtype) for _ in range(5)]
    for table in tables:
        table[torch.rand(R, D) < 0.3] = -0.0
        table[:2] = torch.tensor([float("inf"), float("nan")], dtype=dtype)[:, None]
    columns = (Column(Source(0, lane=1, start=k, length=1), k, 0, D * k, pool=pool) for k in range(5))
    plan = Plan(tuple(columns), (5 * D,), (str(dtype).removeprefix("torch."),))
    for B in (0, 1, 30, 200):
        ids = torch.randint(0, R, (B, 5))
        (found,) = op.columns([ids], tables, encode(plan))
        expected = torch.cat([F.embedding_bag(ids[:, k : k + 1], tables[k], mode=pool) for k in range(5)], 1)
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())
    ids[100, 3] = R
    with pytest.raises(RuntimeError, match="column=3 row=100"):
        op.columns([ids], tables, encode(plan))


@pytest.mark.parametrize("pool", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ids", [(1, 1), (7, 5), (8, 16), (9, 17), (100, 40), (3, 700), (5, 0)], ids=str)
def test_padded_bags_of_single_floats(isa, ids, dtype, pool):
    """Several bags beside each other give the bits of each by itself, between others and alone."""
    table, x = torch.randn(900, 1), torch.randint(0, 900, ids).to(dtype)
    plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool=pool),), (1,), ("float32",))
    wide = Plan((Column(Source(0, lane=1), 0, 0, 0, pool=pool),), (3,), ("float32",))
    (found,) = op.columns([x], [table], encode(plan))
    assert found.equal(op.columns([x], [table.expand(-1, 3).contiguous()], encode(wide))[0][:, :1]) or not ids[1]
    torch.testing.assert_close(found, reference.columns([x], [table], plan)[0])
    for row in range(ids[0]):
        assert found[row : row + 1].equal(op.columns([x[row : row + 1]], [table], encode(plan))[0]) or not ids[1]


def test_the_first_bad_id_of_bags_beside_each_other(isa):
    plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool="sum"),), (1,), ("float32",))
    x = torch.randint(0, 50, (20, 6))
    x[11, 2], x[9, 5], x[10, 0] = 50, -1, 2**62
    with pytest.raises(RuntimeError, match="row=9 lane=5 value=-1 "):
        op.columns([x], [torch.randn(50, 1)], encode(plan))
