"""Gradients through pooled columns: eager's, for the rows that padding freezes, masks, ties and attention too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.kernels.columns import autograd
from fxopt.patterns.embedding_columns import columns
from tests.patterns import found
from tests.patterns.found import Spelling
from tests.patterns.test_masks import IDS, LENGTHS, POOLINGS, B, L, arange, max_, mean_, sum_

Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def whatever_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also columns whose training is left to PyTorch, because it is faster there."""
    monkeypatch.setattr(columns, "_without_kernel", lambda column: "")


def assert_eager_gradients(model: nn.Module, args: tuple[Tensor, ...], scale: float = 1.0) -> None:
    """Of pooled columns."""
    plan = found.assert_eager_gradients(model, args, scale)
    assert any(column.pool != "none" for column in plan.columns)


FROZEN: dict[str, Forward] = {
    "sum": lambda m, i: m.e(i).sum(1),
    "mean": lambda m, i: m.e(i).mean(1),
    "max": lambda m, i: m.e(i).max(1).values,
    "amax": lambda m, i: m.e(i).amax(1),
    "masked": lambda m, i: mean_(m, i, (i != 0).float()),
    "masked by another id": lambda m, i: max_(m, i, (i != 9).float()),
    "plain and pooled": lambda m, i: torch.cat([m.e(i[:, 0]), m.e(i).sum(1)], 1),
}


@pytest.mark.parametrize("name", FROZEN)
def test_the_row_that_pads_is_read_and_frozen(name: str) -> None:
    model = Spelling(FROZEN[name])
    model.e = nn.Embedding(20, 4, padding_idx=0)
    with torch.no_grad():
        model.e.weight.normal_()
    assert_eager_gradients(model, (IDS,))


def test_equal_maxima() -> None:
    """amax shares the gradient among them, max gives it to one."""
    for pool in (lambda rows: rows.amax(1), lambda rows: rows.max(1).values):
        model = Spelling(lambda m, i, pool=pool: pool(m.e(i)))
        with torch.no_grad():
            model.e.weight.copy_(model.e.weight.round())
        assert_eager_gradients(model, (IDS,))


@pytest.mark.parametrize("mask", ["ids", "lengths"])
@pytest.mark.parametrize("name", ["sum", "sum of filled", "mean over all", "mean", "max", "max of filled"])
def test_masked(name: str, mask: str) -> None:
    def forward(m: Spelling, i: Tensor, n: Tensor) -> Tensor:
        return POOLINGS[name][2](m, i, ((i != 0) if mask == "ids" else arange() < n).float())

    assert_eager_gradients(Spelling(forward), (IDS, LENGTHS))
    if name != "max":
        assert_eager_gradients(Spelling(forward), (IDS, LENGTHS), scale=torch.inf)


def test_divided_by_nothing() -> None:
    """A row without lanes that count: 0 / 0 in eager, whose NaN reaches the rows of all its lanes."""
    model = Spelling(lambda m, i: sum_(m, i, (i != 0).float()) / (i != 0).float().sum(1, keepdim=True))
    assert_eager_gradients(model, (IDS,))


def test_attention_over_what_counts() -> None:
    def forward(m: Spelling, i: Tensor, n: Tensor, s: Tensor) -> Tensor:
        weights = torch.where(arange() < n, s, -1e9).softmax(1)
        return torch.bmm(weights.unsqueeze(1), m.e(i)).squeeze(1)

    assert_eager_gradients(Spelling(forward), (IDS, LENGTHS, torch.randn(B, L)))


@pytest.mark.parametrize("mode", ["sum", "dense"])
def test_a_table_has_one_gradient_where_weights_have_theirs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's; by the reference, which takes longer, the weights alone have theirs."""
    asked: list[Any] = []
    by_reference = autograd._by_reference
    monkeypatch.setattr(autograd, "_by_reference", lambda *given: asked.append(given[-1]) or by_reference(*given))

    def forward(m: Any, i: Tensor, w: Tensor) -> Tensor:
        bag = m.bag(i, per_sample_weights=w) if mode == "sum" else (m.bag.weight[i] * w.unsqueeze(2)).sum(1)
        return torch.cat([bag, m.bag(i)], 1)

    assert_eager_gradients(Spelling(forward), (IDS, torch.rand(IDS.shape)))
    assert [any(tables) for tables in asked] == [False]
