"""sizes: each expression once, from inputs that live; calls that need none."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from fxopt import Config, optimize, rewrites
from fxopt.rewrites import PASSES
from fxopt.shape.expressions import sizes_in

aten = torch.ops.aten
ALONE = Config(disable=tuple({ran.name for ran in PASSES} - {"sizes"}))
Inputs = tuple[Tensor, ...]


class Spelling(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def graph_of(model: nn.Module) -> Graph:
    return model._fxopt.entries[0].executable.graph.graph


def changes(model: nn.Module, name: str = "sizes") -> list[str]:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason
    assert not any(ran.rolled_back for ran in findings.passes)
    assert not any(miss.pattern == "sizes" for ran in findings.passes for miss in ran.misses)
    return [change.what for ran in findings.passes if ran.name == name for change in ran.changes]


def check(forward: Callable[..., Tensor], inputs: Callable[[int], Inputs], config: Config = ALONE) -> nn.Module:
    """Captured at 6, run at other sizes in turn: eager's values from the one capture."""
    model = Spelling(forward)
    fast = optimize(model, inputs(6), config)
    for batch in (6, 1, 3, 0, 7, 1):
        args = inputs(batch)
        assert torch.equal(fast(*args), model(*args)), batch
    assert len(fast._fxopt.entries) == 1
    changes(fast)
    return fast


def x34(batch: int) -> Inputs:
    return (torch.randn(batch, 3, 4),)


NO_SIZE_LEFT = {
    "view": lambda m, x: (x + 1).view(x.size(0), 12) * 2,
    "view in the middle": lambda m, x: (x + 1).transpose(0, 1).contiguous().view(3, x.size(0), 2, 2) * 2,
    "a multiple": lambda m, x: (x + 1).view(x.size(0) * 3, 4) * 2,
    "reshape": lambda m, x: (x + 1).transpose(1, 2).reshape(x.shape[0], 6, 2) * 2,
    "unflatten": lambda m, x: (x + 1).flatten(0, 1).unflatten(0, (x.size(0), 3)) * 2,
    "expand": lambda m, x: x[:, :1].expand(x.size(0), 5, 4) * 2,
    "broadcast_to": lambda m, x: x[:, :1].broadcast_to(x.size(0), 5, 4) * 2,
    "slice to the end": lambda m, x: (x + 1)[: x.size(0)] * 2,
    "slice beyond the end": lambda m, x: (x + 1)[1 : x.size(0) + 7] * 2,
    "slice with a step": lambda m, x: (x + 1)[0 : x.size(0) : 2] * 2,
    "-1 arithmetic": lambda m, x: x.flatten(1).view(-1, x.numel() // x.size(0) if False else 12) * 2,
}


@pytest.mark.parametrize("name", NO_SIZE_LEFT)
def test_no_size_is_asked_for(name: str) -> None:
    fast = check(NO_SIZE_LEFT[name], x34)
    assert not list(sizes_in(graph_of(fast)))


def test_what_static_dims_leave_is_no_size() -> None:
    """(At batch 0 eager finds the -1 ambiguous.)"""
    model = Spelling(lambda m, x: F.linear(x, m.table.weight).view(x.size(0), 2, -1) * 2)
    fast = optimize(model, (torch.randn(5, 4),), ALONE)
    for batch in (1, 2, 9):
        args = (torch.randn(batch, 4),)
        assert torch.equal(fast(*args), model(*args))
    assert not list(sizes_in(graph_of(fast)))


STAYING = {
    "two sizes": (lambda m, x, y: (x.unsqueeze(1) * y).view(x.size(0), y.size(0), 2, 2) * 2, 2),
    "a size of 0": (lambda m, x, y: x[:, :0].reshape(y.size(0), 0).sum(1) + y[:, 0], 1),
    "an outer expand": (lambda m, x, y: (y + 1).expand(x.size(0), -1, 4) * 2, 1),
    "a slice that cuts": (lambda m, x, y: torch.cat([x, y])[: x.size(0)] * 2, 1),
    "a number": (lambda m, x, y: x * y.size(0), 1),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_inference_does_not_tell_stays(name: str) -> None:
    forward, count = STAYING[name]
    fast = check(forward, lambda batch: (torch.randn(batch, 4), torch.randn(batch + 2, 4)))
    assert len(list(sizes_in(graph_of(fast)))) == count


def test_each_expression_once_and_from_inputs() -> None:
    def forward(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a = torch.relu(x)
        both = torch.cat([a, a, y]) * 2
        twice = both[: a.size(0) + x.size(0)]
        return twice.sum() + both.narrow(0, 1, both.size(0) - 1).sum() * (both.shape[0] - y.shape[0])

    fast = check(forward, lambda batch: (torch.randn(batch, 4), torch.randn(batch + 2, 4)))
    nodes = list(sizes_in(graph_of(fast)))
    terms = [node.meta["val"].node.expr for node in nodes]
    assert len(set(terms)) == len(terms)
    assert all(
        a.op == "placeholder" for node in nodes if node.target is aten.sym_size.int for a in node.all_input_nodes
    )
    assert any(" sizes into " in what for what in changes(fast))


def test_a_tensor_that_lent_its_size_dies() -> None:
    def forward(m: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        found = torch.relu(torch.cat([m.table(ids), m.table(ids)], 1))
        return x * found.size(0) + found.size(0) // 2

    fast = check(forward, lambda batch: (torch.randn(batch, 4), torch.randint(0, 10, (batch,))))
    assert [node.target for node in graph_of(fast).nodes if isinstance(node.target, torch._ops.OpOverload)] == [
        aten.sym_size.int, aten.mul.Tensor, aten.add.Tensor,
    ]  # fmt: skip


def test_sizes_that_depend_on_data_stay() -> None:
    def forward(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(x, [int(n) for n in lengths.tolist()])
        return torch.cat([part.sum(0) for part in parts]) + x.view(x.size(0), 4).sum()

    model = Spelling(forward)
    args = torch.randn(6, 4), torch.tensor([1, 2, 3])
    fast = optimize(model, args, ALONE)
    for batch in (6, 8):
        args = torch.randn(batch, 4), torch.tensor([1, 2, batch - 3])
        assert torch.equal(fast(*args), model(*args))


def test_a_random_call_that_is_spelled_otherwise_draws_once() -> None:
    model = Spelling(lambda m, x: x + torch.randn(x.size(0), x.size(1)) + torch.rand(x.size(0)).unsqueeze(1))
    fast = optimize(model, (torch.randn(5, 4),), ALONE)
    args = (torch.randn(3, 4),)
    torch.manual_seed(0)
    expected, state = model(*args), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(fast(*args), expected) and torch.equal(torch.get_rng_state(), state)


def filled(m: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.rand(x.shape[0], 8)
    for k in range(x.shape[0]):  # the batch is a number from here on
        best[k, :4] = x[k]
    return best, torch.randn(x.shape[0], 4)


def test_a_copy_for_an_edit_stands_behind_what_it_copies() -> None:
    model = Spelling(filled)
    fast = optimize(model, (torch.randn(4, 4),), ALONE)
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason
    for rows in (4, 6):
        x = torch.randn(rows, 4)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=0)


def test_a_batch_that_does_not_fit_raises_as_eager_does() -> None:
    model = Spelling(lambda m, x, y: (x + 1).view(y.size(0), 4) * 2)
    fast = optimize(model, (torch.randn(6, 4), torch.randn(6)), ALONE)
    args = torch.randn(6, 4), torch.randn(5)
    for net in (model, fast):
        with pytest.raises(RuntimeError, match="invalid for input of size 24"):
            net(*args)


def test_gradients_are_eagers() -> None:
    model = Spelling(
        lambda m, x, ids: (m.table(ids).view(x.size(0), 2, 2) * x.view(-1, x.size(0) * 4 // 4, 2, 2)).sum(0)
    )
    fast = optimize(model, (torch.randn(6, 4), torch.randint(0, 10, (6,))), ALONE)
    for batch in (1, 5):
        args = torch.randn(batch, 4), torch.randint(0, 10, (batch,))
        expected, found = (torch.autograd.grad(net(*args).square().sum(), model.table.weight) for net in (model, fast))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_pass_is_at_its_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    (sizes,) = (ran for ran in PASSES if ran.name == "sizes")
    monkeypatch.setattr(rewrites, "PASSES", (sizes, sizes))
    model = Spelling(lambda m, x: torch.cat([x, x]).view(2 * x.size(0), 12)[: x.size(0)] * torch.relu(x).size(0))
    fast = optimize(model, x34(5))
    first, second = (ran for ran in fast._fxopt.findings[0].passes if ran.name == "sizes")
    assert first.changes and not second.changes


def test_the_call_itself_reads_an_attribute() -> None:
    fast = check(lambda m, x: x * x.size(0) + x.numel(), x34)
    targets = [node.target for node in fast._fxopt.entries[0].executable.run.__self__.graph.nodes]
    assert getattr in targets and aten.sym_size.int not in targets and aten.sym_numel.default not in targets
    assert operator.mul in targets or torch.mul in targets
