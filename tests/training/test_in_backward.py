"""Tables whose optimizers apply_optimizer_in_backward hung on them: eager's bits, by rows where the formula allows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply

import fxopt
from fxopt.kernels.columns import in_backward

R, D = 30, 5


class Tables(nn.Module):
    """Lookups and bags; one table is read twice, and bags have duplicates."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(R, D)
        self.padded = nn.Embedding(R, D, padding_idx=3)
        self.bag = nn.EmbeddingBag(R, D, mode="sum")

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        looked_up = [self.shared(ids[:, 0]), self.shared(ids[:, 1]), self.padded(ids[:, 2]), self.bag(ids)]
        return torch.cat(looked_up, 1) * weights


def tables(seed: int = 0) -> Tables:
    torch.manual_seed(seed)
    return Tables()


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(steps):
        rows = (step * 5) % 13
        yield torch.randint(0, R, (rows, 3)), torch.randint(-9, 9, (rows, 4 * D)) / 8.0  # exact sums


def row_wise_adagrad() -> Any:
    return pytest.importorskip("torchrec.optim.rowwise_adagrad").RowWiseAdagrad


BY_ROW = {
    "sgd": (lambda: torch.optim.SGD, {"lr": 0.1}),
    "rising": (lambda: torch.optim.SGD, {"lr": torch.tensor(0.1), "maximize": True}),
    "adagrad": (lambda: torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "row-wise": (row_wise_adagrad, {"lr": 0.1, "lr_decay": 0.01}),
}
DENSE = {
    "momentum": (lambda: torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "decay": (lambda: torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "adam": (lambda: torch.optim.Adam, {"lr": 0.01}),
    "no eps": (lambda: torch.optim.Adagrad, {"lr": 0.1, "eps": 0.0, "initial_accumulator_value": 0.1}),
}


@pytest.fixture
def by_row(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tables that a step on rows was made for."""
    seen: list[Tensor] = []
    step = in_backward._step_rows
    monkeypatch.setattr(in_backward, "_step_rows", lambda o, table, *rest: (seen.append(table), step(o, table, *rest)))
    return seen


def compare(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is None and theirs.grad is None, name
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)
        for a, b in zip(mine._in_backward_optimizers, theirs._in_backward_optimizers, strict=True):
            torch.testing.assert_close(a.state.get(mine, {}), b.state.get(theirs, {}), rtol=0, atol=0, msg=name)
            assert len(a.state) == len(b.state) and a.param_groups[0]["params"][0] is mine


@pytest.mark.parametrize("name", [*BY_ROW, *DENSE])
def test_every_optimizer_gives_eagers_bits(name: str, by_row: list[Tensor]) -> None:
    kind, options = {**BY_ROW, **DENSE}[name]
    eager, model = tables(), tables()
    for module in (eager, model):
        apply(kind(), module.parameters(), options)
    optimized = fxopt.optimize(model)
    for ids, weights in batches(8):
        for module in (eager, optimized):
            module(ids, weights).sum().backward()
        compare(model, eager)
    assert len(by_row) == (8 * 3 if name in BY_ROW else 0)


def _scale(table: Tensor) -> None:
    table.grad *= 0.5


def _two(model: Tables) -> None:
    apply(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def _watched(model: Tables) -> None:
    def before(optimizer: Any, *_: Any) -> None:
        _scale(optimizer.param_groups[0]["params"][0])

    for table in model.parameters():
        table._in_backward_optimizers[0].register_step_pre_hook(before)


def _hooked(model: Tables) -> None:
    for table in model.parameters():
        table.register_hook(lambda grad: grad.mul(3))


def _accumulated(model: Tables) -> None:
    for table in model.parameters():
        table.register_post_accumulate_grad_hook(_scale)


def _behind(model: Tables) -> None:
    nodes = [table.view_as(table).grad_fn.next_functions[0][0] for table in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: None)


def _further(model: Tables) -> None:
    for table in model.parameters():
        group = {"params": [nn.Parameter(torch.ones(3))]}
        table._in_backward_optimizers[0].add_param_group(group)


@pytest.mark.parametrize("change", [_two, _watched, _hooked, _accumulated, _behind, _further])
def test_what_a_user_hung_on_a_table_sees_what_it_does_in_eager(change: Any, by_row: list[Tensor]) -> None:
    eager, model = tables(), tables()
    for module in (eager, model):
        apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        change(module)
    optimized = fxopt.optimize(model)
    for ids, weights in batches(4):
        for module in (eager, optimized):
            module(ids, weights).sum().backward()
        compare(model, eager)
    assert not by_row


def test_options_changed_between_steps_count(by_row: list[Tensor]) -> None:
    eager, model = tables(), tables()
    for module in (eager, model):
        apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    optimized = fxopt.optimize(model)
    for step, (ids, weights) in enumerate(batches(6)):
        for module in (eager, model):
            for table in module.parameters():
                table._in_backward_optimizers[0].param_groups[0].update(
                    lr=0.1 / (1 + step), weight_decay=0.1 * (step > 3)
                )
        for module in (eager, optimized):
            module(ids, weights).sum().backward()
        compare(model, eager)
    assert len(by_row) == 4 * 3


def test_gradients_that_are_asked_for_are_dense_and_step_nothing() -> None:
    model = tables()
    apply(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before, optimized = copy.deepcopy(list(model.parameters())), fxopt.optimize(model)
    ids, weights = torch.randint(0, R, (7, 3)), torch.randn(7, 4 * D)
    found = torch.autograd.grad(optimized(ids, weights).sum(), list(model.parameters()))
    assert all(grad.layout is torch.strided for grad in found)
    assert all(map(torch.equal, before, model.parameters()))
    optimized(ids, weights).sum().backward(inputs=[model.bag.weight])
    assert [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)] == [False, False, True]


def test_two_calls_and_an_eager_reader_are_one_step(by_row: list[Tensor]) -> None:
    eager, model = tables(), tables()
    for module in (eager, model):
        apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    optimized = fxopt.optimize(model)
    for (ids, weights), (more, scales) in zip(batches(4), batches(4), strict=True):
        for module in (eager, optimized):
            loss = module(ids, weights).sum() + module(more, scales).sum() + module.bag.weight.square().sum()
            loss.backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(by_row) == 4 * 2  # the bag's gradient is dense
