"""Embedding columns beside what they only copy: when, and that whatever reads or reuses memory waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.kernels import side_stream
from fxopt.rewrites import branches, embedding_columns, late_copies
from fxopt.rewrites.direct import direct
from tests.cuda.on_a_gpu import names_beside, names_of, rewritten
from tests.cuda.streams import Hazard, Stream, run_captured


def lookups(dense, ids, weight, *tables):
    x = torch.relu(dense @ weight)
    rows = torch.cat([x, *(F.embedding(ids.select(1, k), table) for k, table in enumerate(tables))], 1)
    return rows.sum(1, keepdim=True) * x


def of_a_batch() -> list[torch.Tensor]:
    """What `lookups` takes."""
    tables = [torch.randn(9, 4) for _ in range(3)]
    return [torch.randn(5, 3), torch.randint(0, 9, (5, 3)), torch.randn(3, 4), *tables]


@pytest.fixture
def kernel(monkeypatch) -> None:
    """As if there were one on CUDA."""
    monkeypatch.setattr(late_copies, "kernel_on_cuda", lambda: True)


def of_lookups(function: Callable) -> torch.fx.GraphModule:
    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape, device="cuda") for shape in ((5, 3), (5, 3), (3, 4), *[(9, 4)] * 3)]
        fakes[1] = fakes[1].long()
        module = make_fx(function, pre_dispatch=True)(*fakes)
    rewritten(module, embedding_columns.REWRITE)
    return module


def through_dispatcher(module) -> None:
    """The columns, where streams that are none see them."""
    for node in module.graph.nodes:
        if str(node.target) == "fxopt.columns.default":
            del node.meta["bound"]


def test_lookups_do_not_wait_for_what_they_copy(monkeypatch, kernel):
    module = of_lookups(lookups)
    assert names_of(module).index("fxopt.columns") > names_of(module).index("aten.relu")
    findings, others = rewritten(module, late_copies.REWRITE, branches.REWRITE)
    assert len(findings.changes) == 1 and not findings.rolled_back and not others.changes
    assert names_beside(module) == ["matmul", "relu", "late_copy"]
    inputs = of_a_batch()
    torch.testing.assert_close(module(*inputs), lookups(*inputs))
    through_dispatcher(module)
    direct(module, inference=True)
    order = [module.code.index(f"side_stream_{name}(") for name in ("fork", "enter", "leave", "join")]
    assert order == sorted(order) and order[0] < module.code.index("columns.default(") < order[1]
    capture, result = run_captured(module, inputs, monkeypatch)
    torch.testing.assert_close(result, lookups(*inputs))
    assert [side.launched for side in capture.sides] == [3] and capture.current is capture.main


def test_what_had_the_memory_of_late_copies_before_is_waited_for(monkeypatch, kernel):
    module = of_lookups(lookups)
    rewritten(module, late_copies.REWRITE)
    through_dispatcher(module)
    direct(module, inference=True)
    monkeypatch.setattr(side_stream, "_beside", lambda main: Stream())
    with pytest.raises(Hazard):
        run_captured(module, of_a_batch(), monkeypatch, lambda: torch.randn(5).neg())


def test_memory_of_an_earlier_branch_that_lookups_read_is_not_taken_by_the_next_one(monkeypatch, kernel):
    """The columns run beside the branch of what they copy, which does not wait for them."""

    def hashed(dense, ids, weight, *tables):
        x = torch.relu(dense @ weight)
        left, right = torch.cumsum(ids, 0).clamp(0, 8).flip([0]), torch.flip(ids, [0]).cummax(1).values
        parts = [F.embedding(left.select(1, 0), tables[0]), F.embedding(right.select(1, 1), tables[1])]
        return torch.cat([x, *parts], 1).sum(1, keepdim=True) * x

    module = of_lookups(hashed)
    for findings in rewritten(module, late_copies.REWRITE, branches.REWRITE):
        assert len(findings.changes) == 1
    through_dispatcher(module)
    direct(module, inference=True)
    inputs = of_a_batch()
    _, result = run_captured(module, inputs, monkeypatch)
    torch.testing.assert_close(result, hashed(*inputs))


def test_lookups_by_what_was_computed_wait(kernel):
    def chosen(dense, ids, weight, *tables):
        x = torch.relu(dense @ weight)
        ids = ids + x.select(1, 0).sum().long()
        return torch.cat([x, *(F.embedding(ids.select(1, k), table) for k, table in enumerate(tables))], 1) * 2

    assert not rewritten(of_lookups(chosen), late_copies.REWRITE)[0].changes


def test_lookups_in_pytorch_write_all_of_a_row(monkeypatch):
    monkeypatch.setattr(late_copies, "kernel_on_cuda", lambda: False)
    assert not rewritten(of_lookups(lookups), late_copies.REWRITE)[0].changes
