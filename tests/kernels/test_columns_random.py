"""The kernel against the reference, on random plans and hostile values, under every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import op, reference
from fxopt.kernels.columns.encode import decode, encode, plan_of
from fxopt.kernels.columns.programs import read

KINDS = ("lookup", "lookup", "dense_pool", "bag", "copy", "more", "masked")
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def same_bits(a, b):
    """Equal bit for bit, NaNs of any payload alike."""
    return ((a.view(BITS[a.dtype]) == b.view(BITS[b.dtype])) | (a.isnan() & b.isnan())).all()


def slots(call, output):
    for column in call.columns:
        dim = 1 if column.table is None else call.tables[column.table].shape[1]
        lanes = 1
        if column.pool == "none" and column.source.lane is not None:
            lanes = read(call.tensors, column.source, call.rows).shape[1]
        yield column, output[:, column.offset : column.offset + dim * lanes]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 21, 70])
@pytest.mark.parametrize("seed", range(12))
def test_kernel_equals_reference(isa, random_call, seed, rows):
    call = random_call(seed * 100 + rows, rows, 12, KINDS)
    plan = encode(call.plan)
    (expected,) = reference.columns(call.tensors, call.tables, call.plan)
    (found,) = op.columns(call.tensors, call.tables, plan)
    assert found.shape == expected.shape == (rows, call.width) and found.dtype == expected.dtype
    for (column, a), (_, b) in zip(slots(call, found), slots(call, expected), strict=True):
        if column.bag is None and column.pool in ("sum", "mean"):
            continue  # reordered sums: test_error_of_sums
        if column.bag and found.dtype == torch.bfloat16:
            continue  # FBGEMM rounds ties away from zero, the kernel to even
        assert same_bits(a, b), (column, a, b)
    (dispatched,) = torch.ops.fxopt.columns(call.tensors, call.tables, plan)
    assert same_bits(dispatched, found)


@pytest.mark.parametrize("seed", range(15))
def test_error_of_sums(isa, random_call, seed):
    call = random_call(seed, 9, 6, ("dense_pool", "bag", "masked"))
    (found,) = op.columns(call.tensors, call.tables, encode(call.plan))
    (eager,) = reference.columns(call.tensors, call.tables, call.plan)
    wide = call.plan.__class__(call.plan.columns, call.plan.widths, ("float64",))
    (exact,) = reference.columns(call.tensors, [t.double() for t in call.tables], wide)
    rounding = torch.finfo(found.dtype).eps
    for (column, a), (_, b), (_, c) in zip(slots(call, found), slots(call, eager), slots(call, exact), strict=True):
        assert (a.isnan() == c.isnan()).all(), column
        ok = c.isfinite()
        assert a[c.isinf()].equal(c[c.isinf()].to(a.dtype)), column
        if not ok.any():
            continue
        ours, theirs = (a.double() - c)[ok].abs(), (b.double() - c)[ok].abs()
        scale = c[ok].abs() + 1
        assert (ours / scale).max() <= 2 * (theirs / scale).max() + 4 * rounding, column


@pytest.mark.parametrize("seed", range(30))
def test_encoding_round_trip(random_call, seed):
    plan = random_call(seed, 6, 10, KINDS).plan
    named = replace(plan, columns=tuple(replace(c, name="x", table_name="t", runtime_error=True) for c in plan.columns))
    assert decode(encode(named)) == plan
    assert plan_of(encode(named)) == named
    assert plan_of(encode(named).clone()) == plan
    assert b"x\0t\0" in encode(named).numpy().tobytes()


def test_threads_give_the_same_bits(random_call):
    call = random_call(5, 700, 40, ("lookup", "bag", "dense_pool", "more"))
    plan, threads = encode(call.plan), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (one,) = op.columns(call.tensors, call.tables, plan)
        torch.set_num_threads(3)
        (three,) = op.columns(call.tensors, call.tables, plan)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(one, three)
