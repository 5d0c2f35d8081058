"""The shim notices what is wrong: each bug of mutants.py, and a seeded schedule that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns.plan import Column, Instr, Offsets, Op, Plan, Source
from fxopt.kernels.columns.quantized import quantized
from tests.cuda.mutants import MUTATIONS
from tests.cuda.planted import awake
from tests.cuda.shim_library import ShimError
from tests.cuda.test_block_bags_shim import padded as padded_with_weights
from tests.cuda.test_columns_shim import one_column
from tests.cuda.test_copies_shim import expanded
from tests.cuda.test_lookups_shim import ADDED, added, beside, converted, of_floats
from tests.cuda.test_loose_bags_shim import ADDED as OF_A_BAG
from tests.cuda.test_loose_bags_shim import KEEP, stepped
from tests.cuda.test_short_bags_shim import short, with_long_ones
from tests.cuda.test_tiles_shim import narrow
from tests.kernels.test_columns_random import same_bits


def bucketized():
    edges = torch.linspace(0, 1, 100)
    program = (Instr(Op.BUCKETIZE, "int64", 0, tensor=1),)
    plan = Plan((Column(Source(0), 0, 0, 0, program),), (8,), ("float32",))
    return [torch.rand(45), edges], [torch.randn(101, 8)], plan


def padded():
    plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool="sum", padding=0),), (8,), ("float32",))
    return [torch.randint(0, 3, (5, 9))], [torch.randn(7, 8)], plan


def short_bags(dim):
    plan = Plan((Column(Source(0, lane=1), 0, 0, 0, pool="sum"),), (dim,), ("float32",))
    return [torch.randint(0, 50, (5, 61))], [torch.randn(50, dim)], plan


def codes(**how):
    plan = Plan((Column(Source(0), 0, 0, 0, **how),), (16,), ("float32",))
    return [torch.arange(1, 46), torch.tensor([0, 20])], [quantized(torch.randn(50, 16))], plan


def three_chunks():
    plan = Plan((Column(Source(0), 0, 0, 0),), (12,), ("float32",))
    return [torch.randint(0, 50, (3000,))], [torch.randn(50, 12)], plan


def infinite_weight():
    call = padded_with_weights(rows=600, lanes=40, dim=4)
    call[0][1][7, 1] = torch.inf
    return call


def with_a_bad_id(call, tensor=2, at=(5, 2)):
    call[0][tensor][at] = 10**6
    return call


def one_output(call, number=0):
    tensors, tables, plan = call
    made = tuple(replace(column, output=0) for column in plan.columns if column.output == number)
    return tensors, tables, Plan(made, plan.widths[number : number + 1], plan.dtypes[:1])


def halves(number):
    return one_output(converted(45, 12, torch.bfloat16, torch.float32), number)


def loose(pool, first):
    rows = torch.randn(50, 6)
    rows[first] = torch.nan
    ids, bag = torch.tensor([first, 7, 7, first, 7]), torch.tensor([0, 2, 2])
    return [ids, bag], [rows], Plan((Column(Source(0), 0, 0, 0, pool=pool, bag=Offsets(1)),), (6,), ("float32",))


def cut_in_parts():
    ids = torch.randint(0, 7, (1, 700))
    return [ids], [torch.randn(7, 8)], Plan((Column(Source(0, lane=1), 0, 0, 0, pool="sum"),), (8,), ("float32",))


@pytest.mark.parametrize(
    ("name", "call", "notice"),
    [
        ("no bounds check", lambda: one_column(torch.tensor([1, 10**6])), "a load outside every tensor"),
        ("no mask of the tail", lambda: one_column(torch.randint(0, 7, (45,))), "a write outside the output"),
        ("no mask of the tail of codes", codes, "a write outside the output"),
        ("the scale of another row", codes, "wrong"),
        ("the scale beside its place", lambda: codes(pool="sum", bag=Offsets(1)), "wrong"),
        ("no barrier after staging", bucketized, "wrong"),
        ("threads leave before a collective", padded, "deadlock|a write|threads of a warp"),
        ("a join that does not wait for the parts", cut_in_parts, "wrong"),
        ("parts that overlap", cut_in_parts, "wrong"),
        ("no mask behind the last chunk", three_chunks, "wrong"),
        ("rows of an inner dim read as outer ones", expanded, "a load outside every tensor"),
        ("floats that are rounded up", lambda: of_floats(45), "wrong"),
        ("what is added to the first position", lambda: one_output(added(200)), "wrong"),
        ("ids of two strides in a tile", lambda: one_output(added(220, cut=slice(1, -1), dim=8, columns=203)), "wrong"),
        ("rows of other threads", lambda: halves(0), "wrong"),
        ("no mask of converted rows", lambda: halves(0), "wrong"),
        ("another row's divisor", lambda: halves(2), "wrong"),
        ("a block that does not wait for its parts", padded_with_weights, "wrong"),
        ("a block that forgets to join the last part", lambda: padded_with_weights(lanes=127), "wrong"),
        ("weights of the turn before", lambda: padded_with_weights(rows=600, lanes=40, dim=8), "wrong"),
        ("weights that wrap around", infinite_weight, "wrong"),
        ("elements behind a loose row", lambda: loose("sum", 49), "a load outside every tensor"),
        ("a loose row's chunk too far", lambda: loose("sum", 3), "a write outside the output"),
        ("any NaN wins a maximum", lambda: loose("max", 3), "wrong"),
        ("a NaN loses though it comes first", lambda: loose("max", 3), "wrong"),
        ("a maximum of nothing", lambda: loose("max", 3), "wrong"),
        ("a wait for one turn less", lambda: short_bags(4), "copies that nobody waits for"),
        ("a wait for one turn less", lambda: short_bags(8), "copies that nobody waits for"),
        ("a wait for one turn less", lambda: short_bags(12), "copies that nobody waits for"),
        ("copies of ids there are not", lambda: short_bags(8), "a load outside every tensor"),
        ("a tile without a barrier", narrow, "a load outside every tensor"),
        ("no bounds check in a tile", lambda: with_a_bad_id(narrow()), "a load outside every tensor"),
        ("no mask of a tile's tail", lambda: narrow(rows=1150), "a write outside the output"),  # by two rows
        ("a tile moves what it has no ids of", lambda: with_a_bad_id(narrow()), "a load outside every tensor"),
        ("ids of a tile that come late", narrow, "wrong"),
        ("no bounds check in short bags", lambda: with_a_bad_id(short(), 0, 77), "a load outside every tensor"),
        ("rows of the next bag", short, "wrong"),
        ("ids beyond the run", short, "a load outside every tensor"),
        ("ids of a run that come late", with_long_ones, "wrong"),
        ("ids behind a bag left out", with_long_ones, "wrong"),
        ("no mask of bags that are not there", short, "a write outside the output"),
        ("bags left out stay so", with_long_ones, "wrong"),
        ("what is added to the first lane", lambda: beside(45, ADDED), "wrong"),
        ("another lane's ids", lambda: beside(45), "wrong"),
        ("what is added to a bag's first id", lambda: stepped(3, 26, torch.int64, (OF_A_BAG,), "sum"), "wrong"),
        ("ids that do not count", lambda: stepped(3, 26, torch.int64, (KEEP,), "sum"), "wrong"),
        ("a turn of the ring too early", lambda: short_bags(16), "wrong"),
    ],
)
def test_planted_bugs_are_caught(shim, request, name, call, notice):
    mutant = request.getfixturevalue("staged_mutant" if MUTATIONS[name][0] == "staged.cuh" else "mutant")
    tensors, tables, plan = call()
    (right,) = shim.run(tensors, tables, plan)
    shim.failure()
    mutant.failure()  # which the last bug left
    assert same_bits(mutant.run(tensors, tables, plan, 1)[0], right)
    mutant.failure()
    with awake(mutant.library, MUTATIONS, name):
        if notice == "wrong":
            assert not torch.equal(mutant.run(tensors, tables, plan, 1)[0], right)
            return
        with pytest.raises(ShimError, match=notice):
            mutant.run(tensors, tables, plan, 1)
