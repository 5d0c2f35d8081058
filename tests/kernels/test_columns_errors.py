"""What does not fit is an error that says where, never a read out of bounds."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import errors, op, reference
from fxopt.kernels.columns.encode import decode, encode
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, Plan, Source


def run(tensors, tables, *columns, width=8):
    plan = Plan(columns, (width,), ("float32",))
    return op.columns(tensors, tables, encode(plan)), plan


def both_fail(match, tensors, tables, *columns, width=8):
    """The kernel and the reference raise alike; gives the kernel's error and the plan."""
    plan = Plan(columns, (width,), ("float32",))
    with pytest.raises(RuntimeError, match=match):
        reference.columns(tensors, tables, plan)
    with pytest.raises(RuntimeError, match=match) as dispatched:
        torch.ops.fxopt.columns(tensors, tables, encode(plan))
    with pytest.raises(RuntimeError, match=match) as direct:
        op.columns(tensors, tables, encode(plan))
    assert str(direct.value) == str(dispatched.value).splitlines()[0]
    return direct.value, plan


@pytest.mark.parametrize("bad", [100, -1, 2**40, -(2**63)])
def test_bad_id(isa, bad):
    ids = torch.randint(0, 100, (9, 3))
    ids[5, 2] = bad
    column = Column(Source(0, fixed=((1, 2),)), 0, 0, 0, name="column 3 (emb.3)", table_name="emb.3.weight")
    match = f"^fxopt-bad-id column=0 row=5 lane=0 value={bad} rows=100"
    error, plan = both_fail(match, [ids], [torch.randn(100, 8)], column)
    explained = errors.explain(error, plan)
    assert isinstance(explained, IndexError)
    assert str(explained) == f"column 3 (emb.3): id {bad} at row 5 is outside table 'emb.3.weight' with 100 rows"


def test_bad_id_in_a_bag(isa):
    ids, offsets = torch.randint(0, 10, (700,)), torch.tensor([0, 0, 300, 690])
    ids[302] = 10
    column = Column(Source(0), 0, 0, 0, pool="mean", bag=Offsets(1), name="tags")
    error, plan = both_fail("column=0 row=2 lane=2 value=10 rows=10", [ids, offsets], [torch.randn(10, 8)], column)
    assert str(errors.explain(error, plan)) == "tags: id 10 at row 2, position 2 is outside table 0 with 10 rows"


def test_bad_id_among_lanes(isa):
    ids = torch.zeros(4, 300, dtype=torch.int32)
    ids[3, 299] = -5
    for pool in ("none", "sum"):
        column = Column(Source(0, lane=1), 0, 0, 0, pool=pool)
        both_fail("column=0 row=3 lane=299 value=-5 rows=7", [ids], [torch.randn(7, 2)], column, width=600)


def test_first_column_wins_whatever_the_threads():
    ids = torch.full((5000,), 7)
    columns = [Column(Source(0), 0, 0, 8 * i) for i in range(40)]
    with pytest.raises(RuntimeError, match="column=0 row=0 "):
        run([ids], [torch.randn(7, 8)], *columns, width=320)


def test_wrapped_ids(isa):
    table = torch.randn(5, 8)
    column = Column(Source(0), 0, 0, 0, wrap_negative=True)
    (found,), _ = run([torch.tensor([-5, -1, 4])], [table], column)
    assert found.equal(table[torch.tensor([-5, -1, 4])])
    both_fail("value=-6 rows=5", [torch.tensor([0, -6])], [table], column)


def test_other_errors_are_not_about_ids():
    assert errors.explain(RuntimeError("something else"), Plan((), (), ())) is None


@pytest.mark.parametrize("offsets", [[1, 2], [0, 4, 2], [0, 11], [0, -1], [-3, 2]])
def test_bad_offsets(isa, offsets):
    column = Column(Source(0), 0, 0, 0, pool="sum", bag=Offsets(1))
    both_fail("offsets", [torch.zeros(10, dtype=torch.int64), torch.tensor(offsets)], [torch.randn(5, 8)], column)


def test_shapes_that_disagree():
    ids, table = torch.zeros(4, dtype=torch.int64), torch.randn(5, 8)
    with pytest.raises(RuntimeError, match="column 1 has 3 rows, the output 4"):
        run([ids, ids[:3]], [table], Column(Source(0), 0, 0, 0), Column(Source(1), 0, 0, 8), width=16)
    with pytest.raises(RuntimeError, match=r"column 0 writes \[4, 12\) of an output 8 wide"):
        run([ids], [table], Column(Source(0), 0, 0, 4))
    with pytest.raises(RuntimeError, match="weights"):
        run([ids, torch.rand(3)], [table], Column(Source(0, rows=(0,)), 0, 0, 0, pool="sum", weights=Source(1)))
    with pytest.raises(RuntimeError, match="tensor 1 of 1"):
        run([ids], [table], Column(Source(0), 0, 0, 0), Column(Source(1), 0, 0, 8), width=16)
    with pytest.raises(RuntimeError, match="lanes"):
        run([ids.view(2, 2)], [table], Column(Source(0, lane=1, start=1, length=2), 0, 0, 0), width=16)
    with pytest.raises(RuntimeError, match="integers"):
        run([torch.rand(3)], [table], Column(Source(0), 0, 0, 0))
    with pytest.raises(RuntimeError, match="one dtype"):
        bucketize = (Instr(Op.BUCKETIZE, "int64", tensor=1),)
        run([torch.rand(3), torch.rand(3).double()], [table], Column(Source(0), 0, 0, 0, bucketize))


def test_unfit_plans():
    with pytest.raises(ValueError, match="no earlier column"):
        encode(Plan((Column(Source(0), 0, 0, 0, add=True),), (8,), ("float32",)))
    with pytest.raises(ValueError, match="by zero"):
        encode(Plan((Column(Source(0), 0, 0, 0, (Instr(Op.REMAINDER, "int64", 0),)),), (8,), ("float32",)))
    with pytest.raises(ValueError, match="expected an encoded plan"):
        decode(torch.zeros(3))
    with pytest.raises(RuntimeError, match="made by encode"):
        op.columns([torch.zeros(1)], [], torch.zeros(100, dtype=torch.int64))


@pytest.mark.parametrize(
    "source",
    [
        Source(0, rows=(0, 0)),
        Source(0, rows=(1, 0), lane=1),
        Source(0, rows=(0,), fixed=((0, 1),)),
        Source(0, rows=(0,), fixed=((1, 3), (1, 3))),
    ],
)
def test_a_dim_that_is_read_twice_leads_out_of_its_tensor(source):
    plan = encode(Plan((Column(source, 0, 0, 0),), (8,), ("float32",)))
    with pytest.raises(RuntimeError, match="one dim twice"):
        torch.ops.fxopt.columns([torch.zeros(4, 4, dtype=torch.int64)], [torch.randn(3, 8)], plan)


def test_boundaries_may_change_in_place(isa):
    values, boundaries, table = torch.tensor([1.5, 2.5]), torch.tensor([1.0, 2.0]), torch.arange(24.0).view(3, 8)
    column = Column(Source(0), 0, 0, 0, (Instr(Op.BUCKETIZE, "int64", tensor=1),))
    for new in ([1.0, 2.0], [3.0, 2.0], [float("nan"), 2.0]):
        boundaries.copy_(torch.tensor(new))
        (found,), _ = run([values, boundaries], [table], column)
        assert found.equal(table[torch.bucketize(values, boundaries)])
