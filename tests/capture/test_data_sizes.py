"""Sizes that depend on data: captured where they happen to be equal, called where they are not. Eager's results, and
eager's exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.capture import capture
from fxopt.shape.conditions import require
from fxopt.verify.check import Comparison
from fxopt.verify.trial import Setting

CONFIG = Config(verify="off", tune="off")
MASKS = ([1, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1], [1], [0], [], [1] * 8, [1, 0] * 4)
LENGTHS = ([5, 3, 2], [1, 1, 1], [3, 1, 2], [5, 5, 5], [0, 0, 0], [5], [1], [1, 5, 1, 1, 1])
BAGS = ([3, 1, 2], [1, 1, 1], [0, 0, 0], [2, 2], [5], [0], [1, 0, 4, 0, 0, 2])
NUMBERS = ([2, 2, 4], [1, 2, 3], [2, 1, 3], [3, 3, 3], [8, 2], [0, 0, 1], [1, 1, 1], [4, 3])


class Model(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.gate = nn.Linear(8, 3)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def outcome(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    try:
        return model(*(tensor.clone() for tensor in inputs))
    except Exception as error:
        return type(error), str(error)


def check(run: Callable[..., Any], calls: list[tuple[Tensor, ...]], grad: bool = False) -> nn.Module:
    """Captured at the first of these calls; the others are served by it or by eager, never by a wrong graph."""
    model = Model(run).eval()
    with torch.set_grad_enabled(grad):
        optimized = optimize(model, calls[0], CONFIG)
        for number, inputs in enumerate([*calls, *reversed(calls)]):
            wanted, found = outcome(model, inputs), outcome(optimized, inputs)
            if isinstance(wanted, Tensor):
                assert isinstance(found, Tensor), (number, found)
                torch.testing.assert_close(found, wanted, equal_nan=True)
            else:
                assert found == wanted, number
    assert any(entry.executable is not None for entry in optimized._fxopt.entries)  # type: ignore[union-attr]
    return optimized


def masked(mask: list[int]) -> tuple[Tensor, ...]:
    return torch.randn(len(mask), 8), torch.tensor(mask) > 0


def padded(lengths: list[int]) -> tuple[Tensor, ...]:
    return torch.randint(0, 20, (len(lengths), 5)), torch.tensor(lengths)


def jagged(lengths: list[int]) -> tuple[Tensor, ...]:
    return torch.randn(sum(lengths), 8), torch.tensor(lengths)


BY_MASK: dict[str, Callable[..., Any]] = {
    "expand_as": lambda m, x, mask: x[mask].expand_as(x) + 0,
    "expand": lambda m, x, mask: x[mask].expand(x.shape[0], -1) * 2,
    "broadcast_to": lambda m, x, mask: torch.broadcast_to(x[mask], x.shape).relu(),
    "product": lambda m, x, mask: x[mask] * x,
    "layers": lambda m, x, mask: m.first(x[mask]) + m.second(x),
    "where": lambda m, x, mask: torch.where(x > 0, x[mask], x),
    "cat": lambda m, x, mask: torch.cat([x[mask], x], 1),
    "stack": lambda m, x, mask: torch.stack([x[mask], x], 1).sum(1),
    "two masks": lambda m, x, mask: x[mask] + x[~mask],
    "towers": lambda m, x, mask: torch.cat([m.first(x[mask]).relu(), m.second(x).relu()], 1),
    "experts": lambda m, x, mask: torch.stack([expert(x[mask].expand_as(x)) for expert in m.experts], 1),
    "mixture": lambda m, x, mask: (
        torch.stack([expert(x[mask]) for expert in m.experts], 1) * m.gate(x).softmax(1).unsqueeze(2)
    ).sum(1),
    "bmm": lambda m, x, mask: torch.bmm(x[mask].unsqueeze(1), x.unsqueeze(2)).flatten(1),
    "matmul": lambda m, x, mask: (x[mask].t() @ x).softmax(1),
    "view of three": lambda m, x, mask: x[mask].reshape(-1, 24).reshape(-1, 8) * 2,
    "inferred": lambda m, x, mask: x[mask].reshape(x.shape[0], -1) * 2,
    "of the shape": lambda m, x, mask: x[mask].reshape(x.shape) * x,
    "no elements": lambda m, x, mask: x[mask].reshape(x[mask].shape[0], -1) * 2,
    "range": lambda m, x, mask: torch.arange(mask.sum().item()).float()[:, None] + x,
    "slice": lambda m, x, mask: x[: mask.sum().item()] + x,
    "narrow": lambda m, x, mask: x.narrow(0, 0, mask.sum().item()).relu() * x,
    "assigned": lambda m, x, mask: torch.zeros_like(x).copy_(x[mask]) + 1,
    "added": lambda m, x, mask: x.clone().add_(x[mask]),
    "nonzero": lambda m, x, mask: x + mask.nonzero(),
    "largest": lambda m, x, mask: x[mask].amax(0) + x.sum(0),
    "logsumexp": lambda m, x, mask: x[mask].logsumexp(0) + x[mask].logsumexp(1, keepdim=True),
    "repeated": lambda m, x, mask: x[mask].repeat(2, 1)[: x.shape[0]] + x,
    "put back": lambda m, x, mask: torch.zeros_like(x).index_put((mask,), m.first(x[mask])),
}
BY_LENGTHS: dict[str, Callable[..., Any]] = {
    "mask": lambda m, ids, n: ((torch.arange(n.max())[None] < n[:, None]).unsqueeze(-1) * m.table(ids)).sum(1),
    "mean": lambda m, ids, n: (
        ((torch.arange(n.max().item())[None] < n[:, None]).unsqueeze(-1).float() * m.table(ids)).sum(1) / n[:, None]
    ),
    "scores": lambda m, ids, n: (
        m.table(ids).sum(-1).masked_fill(torch.arange(n.max())[None] >= n[:, None], -1e9).softmax(1)
    ),
    "over the batch": lambda m, ids, n: (torch.arange(n.max())[None] < n[:, None]).float() @ m.table(ids).sum(0),
    "some": lambda m, ids, n: m.table(ids[ids > 5]) + m.table(ids[:, 0]),
}
BY_BAGS: dict[str, Callable[..., Any]] = {
    "split": lambda m, x, n: torch.stack([part.sum(0) for part in x.split(n.tolist())]),
    "repeated": lambda m, x, n: torch.repeat_interleave(torch.arange(n.shape[0]), n)[:, None] + x,
    "pooled": lambda m, x, n: torch.zeros(n.shape[0], 8).index_add(
        0, torch.repeat_interleave(torch.arange(n.shape[0]), n), m.first(x)
    ),
    "padded": lambda m, x, n: torch.stack([F.pad(part, (0, 0, 0, 7 - len(part))) for part in x.split(n.tolist())]),
}
BY_NUMBERS: dict[str, Callable[..., Any]] = {
    "ranges": lambda m, n: torch.arange(n[0].item()) + torch.arange(n[1].item()),
    "slices": lambda m, n: m.table(n[: n[0].item()]) + m.table(n[: n[1].item()]),
    "ones": lambda m, n: torch.ones(n[0].item(), 8) * m.first.weight,
    "expand": lambda m, n: m.first.weight[:1].expand(n[0].item(), -1) + m.second.weight,
    "unique": lambda m, n: m.table(n.unique()) + m.table(n),
    "product": lambda m, n: m.table(n).view(n[0].item(), -1) * 2,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", BY_MASK)
def test_rows_that_a_mask_picks(name: str, grad: bool) -> None:
    check(BY_MASK[name], [masked(mask) for mask in MASKS], grad)


@pytest.mark.parametrize("name", BY_LENGTHS)
def test_lengths_that_fill_the_padding(name: str) -> None:
    check(BY_LENGTHS[name], [padded(lengths) for lengths in LENGTHS])


@pytest.mark.parametrize("name", BY_BAGS)
def test_bags(name: str) -> None:
    check(BY_BAGS[name], [jagged(lengths) for lengths in BAGS])


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_sizes_that_are_data(name: str) -> None:
    check(BY_NUMBERS[name], [(torch.tensor(numbers),) for numbers in NUMBERS])


def test_a_graph_waits_for_the_next_call_that_it_serves() -> None:
    """Sizes that it is not for are no error of the graph."""
    optimized = check(BY_MASK["product"], [masked([1, 1, 1]), masked([1, 0, 0]), masked([1, 1])])
    (entry,) = optimized._fxopt.entries  # type: ignore[union-attr]
    assert entry.executable is not None and not entry.findings.eager_reason


def test_the_question_comes_before_an_edit() -> None:
    def run(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        rows = x[mask]
        x.add_(1)
        return rows * x

    model = Model(run).eval()
    optimized = optimize(model, masked([1, 1, 1]), CONFIG)
    for mask in MASKS:
        x, picked = masked(mask)
        expected, found = x.clone(), x.clone()
        assert str(outcome_of_edit(model, expected, picked)) == str(outcome_of_edit(optimized, found, picked))
        assert torch.equal(found, expected)


def outcome_of_edit(model: nn.Module, x: Tensor, mask: Tensor) -> Any:
    try:
        return model(x, mask)
    except RuntimeError as error:
        return str(error)


def test_models_without_a_doubt_ask_nothing() -> None:
    """What holds of a masked layer, of a loss over picked rows and of rows put back, whatever was picked."""
    plain: list[Callable[..., Any]] = [
        lambda m, x, mask: m.first(x[mask]).relu().sum(0),
        lambda m, x, mask: F.mse_loss(m.first(x[mask]), x[mask]),
        lambda m, x, mask: torch.zeros_like(x).index_put((mask,), m.first(x[mask])),
        lambda m, x, mask: torch.cat([x[mask], x[~mask]]).t().reshape(-1),
        lambda m, x, mask: m.table(torch.unique(mask.long())).sum(0),
    ]
    for run in plain:
        optimized = check(run, [masked(mask) for mask in MASKS])
        graph = optimized._fxopt.entries[0].executable.graph.graph  # type: ignore[union-attr]
        assert all(node.target is not require for node in graph.nodes)


def test_inputs_that_a_graph_is_not_for_tell_nothing_of_it() -> None:
    """Verification may make up a mask that picks one row, which eager takes and the graph leaves to it."""
    model = Model(BY_MASK["product"]).eval()
    captured = capture(model, masked([1, 1, 1]))
    for mask, served in (([1, 1, 1, 1], True), ([0, 1, 0], False), ([1], True)):
        setting = Setting(captured, masked(mask), gradients=False)
        assert Comparison("", captured, model, setting, share=None).served == served
