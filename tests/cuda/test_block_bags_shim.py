"""Few bags of many ids that are not plain: a block's warps share one. And weights that are loaded a turn ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Compare, Instr, Offsets, Op, PerRow, Plan, Source
from fxopt.kernels.columns.quantized import quantized
from tests.cuda.compare import RELATIVE

KEPT = (Instr(Op.KEEP, "int64", 0, compare=Compare.NE),)


def padded(dim=64, dtype=torch.float32, lanes=100, rows=3, weights=torch.float32, **more):
    """Beside a lookup, as a model has them: a softmax's weights, of lanes side by side or apart (`more`: fields)."""
    tensors = [
        torch.randint(0, 50, (rows, lanes)),
        torch.rand(lanes, rows).to(weights or torch.float32).T,
        torch.arange(rows) * 40,
        torch.arange(rows) % 50,
    ]
    factors = None if weights is None else Source(1, lane=1)
    bag = Column(Source(0, lane=1), 0, 0, dim, **{"pool": "sum", "weights": factors, **more})
    output = str(dtype).removeprefix("torch.")
    return tensors, [torch.randn(50, dim).to(dtype)], Plan((bag, Column(Source(3), 0, 0, 0)), (2 * dim,), (output,))


def jagged(dim=8, dtype=torch.float32, rows=3, **more):
    """Bags of 70, 0 and 5 ids, and so on: half of them are long enough."""
    lengths = torch.tensor([70, 0, 5] * (rows // 3))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    n = int(offsets[-1])
    tensors = [torch.randint(0, 50, (n,), dtype=torch.int32), offsets, torch.rand(2 * n)[::2] + 0.5]
    table = torch.randn(50, dim)
    table = quantized(table) if dtype == torch.uint8 else table.to(dtype)
    fields = {"pool": "sum", "weights": Source(2), **more}
    column = Column(Source(0), 0, 0, 0, bag=Offsets(1, include_last=True), **fields)
    return tensors, [table], Plan((column,), (dim,), ("float32",))


def with_plain(call):
    """The same beside a plain bag of the same ids: then no block shares a bag."""
    tensors, tables, plan = call
    width = plan.widths[0]
    plain = Column(Source(0, lane=1), 0, 0, width, pool="sum")
    return tensors, tables, replace(plan, columns=(*plan.columns, plain), widths=(width + tables[0].shape[1],))


def infinite(call):
    """A row that is not finite, whose weight is zero in one bag, and that other bags do not have."""
    tensors, (table,), _ = call
    table[49, ::3] = torch.inf
    tensors[0].clamp_(max=48)[1, 60] = 49
    tensors[1][1, 60] = 0
    tensors[1][0, 3] = 7  # times zeros in the lanes of ids there are not
    return call


CASES = {
    "softmax": padded,
    "infinity": lambda: infinite(padded()),
    "one row": lambda: padded(rows=1),
    "many rows": lambda: padded(rows=600, lanes=34, dim=8),
    "fp16 weights": lambda: padded(weights=torch.float16),
    "bf16 everything": lambda: padded(weights=torch.bfloat16, dtype=torch.bfloat16),
    "fp64 weights": lambda: padded(weights=torch.float64, dtype=torch.float64, rows=2),
    "wide rows": lambda: padded(dim=264, rows=2),
    "rows too wide for it": lambda: padded(dim=300, rows=2),
    "rows no 16-byte chunk fits": lambda: padded(dim=37),
    "mean": lambda: padded(pool="mean"),
    "lengths": lambda: padded(weights=None, lengths=PerRow(Source(2))),
    "masked mean": lambda: padded(weights=None, program=KEPT, divisor=PerRow(None)),
    "beside a plain bag": lambda: with_plain(padded()),
    "jagged": jagged,
    "jagged, padding": lambda: jagged(rows=6, dim=12, padding=3),
    "codes": lambda: jagged(dim=16, dtype=torch.uint8),
    "fp16 rows": lambda: jagged(dtype=torch.float16, pool="mean"),
}


@pytest.mark.parametrize("name", CASES)
def test_they_equal_the_reference(shim, name):
    torch.manual_seed(len(name))
    tensors, tables, plan = CASES[name]()
    found, again = (shim.run(tensors, tables, plan, seed)[0] for seed in (1, 2))
    (expected,) = reference.columns(tensors, tables, plan)
    assert shim.failure() == "" and torch.equal(found.nan_to_num(), again.nan_to_num())
    assert (found.isnan() == expected.isnan()).all()
    error = (found.double() - expected.double()).abs() / (expected.double().abs() + 1)
    assert not (error > RELATIVE.get(tables[0].dtype, 2e-5)).any()


@pytest.mark.parametrize("call", [padded, jagged])
def test_a_bad_id_spoils_its_bag_alone(shim, call):
    tensors, tables, plan = call()
    tensors[0].view(-1)[60] = 50
    (found,) = shim.run(tensors, tables, plan)
    assert "column=0 row=0 lane=60 value=50 rows=50" in shim.failure()
    assert found[:, -8:].isnan().all(1).tolist() == [True, False, False]
    (clamped,) = shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    tensors[0].view(-1)[60] = 49
    assert torch.equal(clamped, shim.run(tensors, tables, plan)[0])
