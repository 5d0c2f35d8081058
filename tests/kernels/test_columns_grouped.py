"""The stand-in without a compiler: the reference's outputs and errors, whatever the plan."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import grouped, reference
from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, Plan, Source

KINDS = ("lookup", "lookup", "lookup", "dense_pool", "bag", "copy", "more", "masked")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("rows", [0, 1, 3, 21])
@pytest.mark.parametrize("seed", range(12))
def test_random_plans(random_call, seed, rows):
    call = random_call(seed * 100 + rows, rows, 15, KINDS)
    expected = reference.columns(call.tensors, call.tables, call.plan)
    found = grouped.columns(call.tensors, call.tables, call.plan)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def many(n, rows, program=lambda k: (), **more):
    columns = tuple(Column(Source(0, fixed=((1, k),)), k, 0, 4 * k, program(k), **more) for k in range(n))
    return [torch.randn(10 + k, 4) for k in range(n)], Plan(columns, (4 * n,), ("float32",))


@pytest.mark.parametrize("lengths", [(9, 9, 9, 9, 9), (9, 1, 9, 0, 3)])
@pytest.mark.parametrize("right", [0, 1])
def test_one_search_for_boundaries_of_one_length(monkeypatch, lengths, right):
    values = torch.randn(6, 5)
    values[0, 1], values[1, 1], values[2, 0] = float("nan"), float("inf"), 0.5
    boundaries = [torch.linspace(-1 - k, 1, length) for k, length in enumerate(lengths)]
    tables, plan = many(5, 6, lambda k: (Instr(Op.BUCKETIZE, "int64", right, tensor=1 + k),))
    expected = reference.columns([values, *boundaries], tables, plan)
    searches = []
    search = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda *a, **k: searches.append(a) or search(*a, **k))
    assert same(grouped.columns([values, *boundaries], tables, plan)[0], expected[0])
    assert len(searches) == len(set(lengths))


@pytest.mark.parametrize("wrap, bad", [(False, -1), (False, 11), (True, -12), (True, 11)])
def test_the_first_bad_id_in_the_references_words(wrap, bad):
    tables, plan = many(5, 7, wrap_negative=wrap)
    ids = torch.randint(-10 if wrap else 0, 10, (7, 5))
    assert same(grouped.columns([ids], tables, plan)[0], reference.columns([ids], tables, plan)[0])
    ids[3, 1], ids[6, 1], ids[0, 4] = bad, 2**40, 14
    with pytest.raises(RuntimeError) as expected:
        reference.columns([ids], tables, plan)
    with pytest.raises(RuntimeError, match=f"^fxopt-bad-id column=1 row=3 lane=0 value={bad} ") as found:
        grouped.columns([ids], tables, plan)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_plain_bags(pool, include_last):
    column, table = Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1, include_last)), torch.randn(9, 4)
    plan, ids = Plan((column,), (4,), ("float32",)), torch.randint(0, 9, (8,))
    for offsets in ([0], [0, 8], [0, 0, 8, 8], [0, 2, 8]):
        tensors = [ids, torch.tensor(offsets)]
        assert same(grouped.columns(tensors, [table], plan)[0], reference.columns(tensors, [table], plan)[0])
    wrong = ids.index_fill(0, torch.tensor([2]), 9)
    for tensors in ([wrong, torch.tensor([0, 8])], [ids, torch.tensor([0, 5, 3])], [ids, torch.tensor([0, 9])]):
        with pytest.raises(RuntimeError) as expected:
            reference.columns(tensors, [table], plan)
        with pytest.raises(RuntimeError) as found:
            grouped.columns(tensors, [table], plan)
        assert str(found.value) == str(expected.value)


def test_constants_that_only_compare_equal():
    def program(k):
        by = (0.0, -0.0)[k % 2]
        steps = Instr(Op.DIV, "float32", by), Instr(Op.CLAMP_MIN, "float32", 0.0), Instr(Op.CLAMP_MAX, "float32", 5.0)
        return (*steps, Instr(Op.CAST, "int64"))

    tables, plan = many(4, 3, program)
    values = torch.rand(3, 4) + 1
    assert same(grouped.columns([values], tables, plan)[0], reference.columns([values], tables, plan)[0])


def test_float_ids_are_an_error():
    tables, plan = many(2, 3)
    with pytest.raises(RuntimeError, match="column 0: ids must be integers"):
        grouped.columns([torch.rand(3, 2)], tables, plan)
