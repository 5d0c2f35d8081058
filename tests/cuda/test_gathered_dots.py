"""Dots of vectors that are read from embedding tables: found in graphs, and on a GPU."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

import fxopt
from fxopt.kernels.columns import errors
from fxopt.kernels.columns import op as columns_op
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Plan, Source
from fxopt.kernels.interactions.cuda import dot_rows
from fxopt.kernels.interactions.cuda.gathered import call_of, gathered_dots, in_two, load
from fxopt.kernels.interactions.serves import vectors
from fxopt.rewrites.dot_rows import GATHERED
from fxopt.rewrites.framework.editor import Editor
from fxopt.tune.tuner import Verdict
from tests.cuda.gathered import assert_close, bad, exact, example
from tests.cuda.on_a_gpu import names_of, rewritten


def test_plans_that_are_vectors():
    plan = example(2, 3, 16)[2]
    assert vectors(plan, 16) == 4 and vectors(plan, 32) is None
    for column in (
        Column(Source(1, lane=1), 0, 0, 16),
        Column(Source(1), 0, 0, 16, pool="sum"),
        Column(Source(1), 0, 0, 32),
        Column(Source(1), None, 0, 16),
    ):
        assert vectors(Plan((plan.columns[0], column, *plan.columns[2:]), plan.widths, plan.dtypes), 16) is None


def test_without_the_kernel_both_steps_serve():
    load(torch.device("cpu"))
    tensors, tables, plan, *rest = example(3, 4, 8, torch.float32)
    expected = exact(tensors, tables, plan, *rest)
    for call in (gathered_dots, in_two, torch.ops.fxopt.gathered_dots):
        assert_close(call(tensors, tables, encode(plan), *rest), expected)


def on_a_gpu(tensors, tables, plan, before, i, j, width, read_twice=False):
    """The graph of dots behind a call of columns, whose tensors say that they are on a GPU."""
    dot_rows.OPERATORS.load()
    columns_op.load()
    graph = Graph()
    inputs = [before, i, j, *tables, *tensors[1:]]
    nodes = [graph.placeholder(f"input_{number}") for number in range(len(inputs))]
    with FakeTensorMode():
        for node, tensor in zip(nodes, inputs, strict=True):
            node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    output = graph.output(())
    module = GraphModule(nn.Module(), graph)
    editor, rest, weights, ids = Editor(module, output), nodes[:3], nodes[3 : 3 + len(tables)], nodes[3 + len(tables) :]
    encoded = editor.constant("plan", encode(plan))
    call = editor.call(torch.ops.fxopt.columns.default, [rest[0], *ids], weights, encoded)
    flat = editor.call(operator.getitem, call, 0)
    z = editor.call(torch.ops.aten.view.default, flat, [len(before), -1, tables[0].shape[1]])
    found = editor.call(torch.ops.fxopt.gpu_dots.default, z, *rest, width)
    output.args = ((found, flat) if read_twice else (found,),)
    return module


def test_lookups_in_front_of_dots_are_found():
    module = on_a_gpu(*example(7, 3, 16))
    (found,) = rewritten(module, GATHERED)
    assert len(found.changes) == 1 and not found.rolled_back and not found.misses
    assert names_of(module) == ["fxopt.gathered_dots"]


def test_lookups_that_others_read_stay():
    module = on_a_gpu(*example(7, 3, 16), read_twice=True)
    (found,) = rewritten(module, GATHERED)
    assert not found.changes and "fxopt.gpu_dots" in names_of(module)


def test_other_vectors_stay_with_a_reason():
    pooled = {"pool": "sum", "source": Source(1, lane=1)}
    for dim, change, reason in ((16, pooled, "found pooling"), (24, {}, "found 4 of 24")):
        tensors, tables, plan, *rest = example(7, 3, dim)
        columns = [replace(column, **change) if column.table == 1 else column for column in plan.columns]
        module = on_a_gpu(tensors, tables, replace(plan, columns=tuple(columns)), *rest)
        (found,) = rewritten(module, GATHERED)
        assert not found.changes and reason in found.misses[0].reason


def test_with_gradients_nothing_changes():
    module = on_a_gpu(*example(7, 3, 16))
    (found,) = rewritten(module, GATHERED, inference=False)
    assert not found.changes and "fxopt.gpu_dots" in names_of(module)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "T", "D"), [(2048, 26, 64), (1, 8, 16), (33, 31, 128), (0, 4, 16), (9, 40, 48), (5, 3, 24)]
)
def test_on_a_gpu(dtype, B, T, D):
    for more in ({}, {"ids": torch.int32, "copied": False}, {"packed": False}):
        tensors, tables, plan, *rest = example(B, T, D, dtype, "cuda", **more)
        found = gathered_dots(tensors, tables, encode(plan), *rest)
        expected = exact(tensors, tables, plan, *rest)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=max(1e-3, torch.finfo(dtype).eps), atol=1e-3)


@pytest.mark.gpu
def test_bad_ids_on_a_gpu():
    tensors, tables, plan, *rest = arguments = bad(device="cuda")
    found = call_of(plan)(tensors, tables, encode(plan), *rest)
    with pytest.raises(errors.BadId, match=r"field 1: id 6 at row 3 is outside table 'table 1' with 6 rows"):
        errors.check()
    rows = found.isnan().any(1).tolist()
    assert [row for row in range(6) if rows[row]] == [1, 3]
    before = errors.clamped()
    arguments = bad("clamp", device="cuda")
    assert gathered_dots(*arguments[:2], encode(arguments[2]), *arguments[3:]).isfinite().all()
    assert errors.clamped() - before == 2


class Interaction(nn.Module):
    """DLRM without its layers."""

    def __init__(self, dtype=torch.bfloat16, T=8, D=64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50 + t, D, dtype=dtype, device="cuda") for t in range(T))
        i, j = torch.tril_indices(T + 1, T + 1, -1, device="cuda")
        self.register_buffer("i", i.contiguous())
        self.register_buffer("j", j.contiguous())

    def forward(self, x, ids):
        z = torch.stack([x, *(table(ids[:, t]) for t, table in enumerate(self.tables))], 1)
        return torch.cat([x, torch.bmm(z, z.transpose(1, 2))[:, self.i, self.j]], 1)


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_rewritten(dtype, monkeypatch):
    for name in ("faster", "slower", "mixed"):
        monkeypatch.setattr(Verdict, name, name == "faster")
    model = Interaction(dtype)
    inputs = torch.randn(300, 64, dtype=dtype, device="cuda"), torch.randint(0, 50, (300, 8), device="cuda")
    with torch.no_grad():
        optimized = fxopt.optimize(model, inputs, fxopt.Config(cuda_graphs=True))
        (found,) = optimized._fxopt.findings
        assert "gpu_gathered_dots" in {ran.name for ran in found.passes if ran.changes}
        for rows in (300, 1, 77):
            given = [each[:rows] for each in inputs]
            torch.testing.assert_close(optimized(*given), model(*given), rtol=2e-2, atol=2e-2)
        with pytest.raises(IndexError, match=r"id 999 at row 4 is outside table 'tables.3.weight' with 53 rows"):
            ids = inputs[1].clone()
            ids[4, 3] = 999
            optimized(inputs[0], ids)
            errors.check()
