"""Bags of many ids where few bags wait: cut among warps, joined in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Compare, Instr, Offsets, Op, PerRow, Plan, Source
from tests.cuda.compare import RELATIVE
from tests.kernels.test_columns_random import same_bits


def jagged(dtype: torch.dtype, dim: int, **more: object) -> tuple[list[Tensor], list[Tensor], Plan]:
    """Bags of 701, 0 and 2 ids: on average long enough to be cut, though two have less than a part holds."""
    tensors = [torch.randint(0, 50, (703,)), torch.tensor([0, 701, 701, 703]), torch.rand(703) + 0.5]
    column = Column(Source(0), 0, 0, 0, bag=Offsets(1, include_last=True), **{"pool": "sum", **more})  # type: ignore[arg-type]
    return tensors, [torch.randn(50, dim).to(dtype)], Plan((column,), (dim,), (_output(dtype),))


def dense(dtype: torch.dtype, dim: int, **more: object) -> tuple[list[Tensor], list[Tensor], Plan]:
    tensors = [torch.randint(0, 50, (2, 530)), torch.tensor([529, 100]), torch.rand(2, 530)]
    column = Column(Source(0, lane=1), 0, 0, 0, **{"pool": "mean", **more})  # type: ignore[arg-type]
    return tensors, [torch.randn(50, dim).to(dtype)], Plan((column,), (dim,), (_output(dtype),))


def _output(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"


KEPT = (Instr(Op.KEEP, "int64", 0, compare=Compare.NE),)
CASES = {
    "fp32": lambda: jagged(torch.float32, 12),
    "wide bf16": lambda: jagged(torch.bfloat16, 264, pool="mean"),
    "fp16, weights": lambda: jagged(torch.float16, 8, weights=Source(2)),
    "padding": lambda: jagged(torch.float32, 4, pool="mean", padding=3),
    "padded rows": lambda: dense(torch.float32, 36),
    "lengths": lambda: dense(torch.float32, 8, lengths=PerRow(Source(1))),
    "masked mean": lambda: dense(torch.float32, 8, pool="sum", program=KEPT, divisor=PerRow(None)),
    "fp64": lambda: jagged(torch.float64, 40, pool="mean"),
    "fp64, weights": lambda: jagged(torch.float64, 3, weights=Source(2)),
    "rows no 16-byte chunk fits": lambda: jagged(torch.float32, 37, padding=3),
    "maxima": lambda: jagged(torch.bfloat16, 40, pool="max"),
    "maxima, padding": lambda: jagged(torch.float64, 5, pool="max", padding=3),
    "maxima of padded rows": lambda: dense(torch.float32, 8, pool="max"),
    "maxima of masked rows": lambda: dense(
        torch.float32, 8, pool="max", program=KEPT, masked="filled", masked_value=-9.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cut_bags_equal_the_reference(shim, name):
    torch.manual_seed(len(name))
    tensors, tables, plan = CASES[name]()
    found, again = (shim.run(tensors, tables, plan, seed)[0] for seed in (1, 2))
    (expected,) = reference.columns(tensors, tables, plan)
    assert shim.failure() == "" and torch.equal(found, again)
    if plan.columns[0].pool == "max":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=RELATIVE[tables[0].dtype], atol=1e-4)


@pytest.mark.parametrize("place", [0, 1, 300, 529])  # in the first, second and third part
@pytest.mark.parametrize("call", [jagged, dense])
def test_nan_and_infinity_among_maxima(shim, call, place):
    """NaN wins in padded rows, and in a jagged bag only where it comes first; also where padding is before it."""
    tensors, (table,), plan = call(torch.float32, 6, pool="max", padding=3 if call is jagged else None)
    table[7, ::2], table[8] = float("nan"), -torch.inf
    tensors[0].masked_fill_(tensors[0] == 7, 8)
    tensors[0].view(-1)[:place] = 8 if place == 300 else 3
    tensors[0].view(-1)[place] = 7
    (found,), (expected,) = shim.run(tensors, [table], plan), reference.columns(tensors, [table], plan)
    assert shim.failure() == "" and same_bits(found, expected)


def test_a_bad_id_spoils_its_bag_alone(shim):
    tensors, tables, plan = jagged(torch.float32, 12)
    tensors[0][640] = 50
    (found,) = shim.run(tensors, tables, plan)
    assert "column=0 row=0 lane=640 value=50 rows=50" in shim.failure()
    assert found.isnan().all(1).tolist() == [True, False, False]
    (clamped,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    tensors[0][640] = 49
    assert torch.equal(clamped, shim.run(tensors, tables, plan)[0])


def test_broken_offsets_are_reported(shim):
    tensors, tables, plan = jagged(torch.float32, 12)
    tensors[1] = torch.tensor([0, 701, 699, 703])
    (found,) = shim.run(tensors, tables, plan)
    assert "offsets of bag 1" in shim.failure() and found[1].isnan().all()
