"""What the mode "clamp" counts, through the shim: each id of a real row once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxopt.kernels import reports
from fxopt.kernels.columns.plan import Column, PerRow, Plan, Source
from tests.cuda.test_long_bags_shim import dense, jagged


def counted(shim, tensors, tables, plan):
    before = shim.library.fxopt_cuda_clamped(0)
    shim.run(tensors, tables, replace(plan, bad_ids="clamp"))
    return shim.library.fxopt_cuda_clamped(0) - before


@pytest.mark.parametrize(
    "call",
    [
        lambda: jagged(torch.bfloat16, 264),  # more than a warp takes of a row at a time
        lambda: jagged(torch.float32, 8, padding=3),
        lambda: jagged(torch.float32, 70, pool="max"),
        lambda: dense(torch.float32, 8),
    ],
)
def test_an_id_counts_once_whatever_its_row_is_wide(shim, call):
    tensors, tables, plan = call()
    tensors[0].view(-1)[[5, 500, 702]] = torch.tensor([50, -1, 10**9])
    assert counted(shim, tensors, tables, plan) == 3


def test_lanes_behind_the_length_do_not_count(shim):
    tensors, tables, plan = dense(torch.float32, 8, lengths=PerRow(Source(1)))  # 529 and 100 of 530
    tensors[0][:, [99, 100, 529]] = 50
    assert counted(shim, tensors, tables, plan) == 2 + 1


@pytest.mark.parametrize("real", [0, 1, 3, 4])
def test_rows_that_a_graph_pads_do_not_count(shim, monkeypatch, real):
    """Of a batch of 4, in columns of 4 and (in another output) of 8 rows."""
    ids, pairs = torch.full((4, 2), 9), torch.full((4, 2, 3), -5)
    columns = (
        Column(Source(0, lane=1), 0, 0, 0),
        Column(Source(0, lane=1), 1, 0, 16, pool="sum"),
        Column(Source(1, rows=(0, 1), lane=2), 0, 1, 0, pool="mean"),
    )
    plan = Plan(columns, (24, 8), ("float32", "float32"))
    monkeypatch.setattr(reports, "_kernels", [shim.library])
    real_rows = torch.tensor([real])
    pointer = shim._name(real_rows)
    with reports.padded(real_rows, 4):
        assert counted(shim, [ids, pairs], [torch.randn(7, 8), torch.randn(9, 8)], plan) == real * (2 + 2 + 2 * 3)
    shim.library.shim_forget(pointer)
    assert counted(shim, [ids, pairs], [torch.randn(7, 8), torch.randn(9, 8)], plan) == 40
