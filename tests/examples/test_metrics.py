from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrics import auc, log_loss


def brute_force_auc(labels: list[int], scores: list[float]) -> float:
    positive = [score for label, score in zip(labels, scores, strict=True) if label]
    negative = [score for label, score in zip(labels, scores, strict=True) if not label]
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=60))
def test_auc_counts_pairs_and_halves_ties(rows: list[tuple[bool, int]]) -> None:
    labels, scores = [int(label) for label, _ in rows], [float(score) for _, score in rows]
    found = auc(torch.tensor(labels), torch.tensor(scores))
    if len(set(labels)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(brute_force_auc(labels, scores), abs=1e-12)


def test_auc_of_perfect_reversed_constant_and_infinite_scores() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(labels, torch.tensor([1.0, 2.0, 3.0, 4.0])) == 1.0
    assert auc(labels, torch.tensor([4.0, 3.0, 2.0, 1.0])) == 0.0
    assert auc(labels, torch.zeros(4)) == 0.5
    assert auc(labels, torch.tensor([-torch.inf, 0.0, 0.0, torch.inf])) == 0.875


def test_auc_rejects_what_has_no_order() -> None:
    with pytest.raises(ValueError, match="NaN"):
        auc(torch.tensor([0, 1]), torch.tensor([0.0, torch.nan]))
    with pytest.raises(ValueError, match=r"\[N\]"):
        auc(torch.tensor([0, 1]), torch.zeros(2, 1))


def test_auc_stays_exact_with_many_rows() -> None:
    labels = torch.arange(300_000) % 3 == 0
    scores = torch.arange(300_000).float().div(1000).floor()  # 300 groups of ties
    halves = brute_force_auc([int(x) for x in labels[:1500]], scores[:1500].tolist())
    assert auc(labels[:1500], scores[:1500]) == pytest.approx(halves, abs=1e-12)
    assert auc(labels, scores) == pytest.approx(0.5, abs=1e-5)


def test_log_loss_is_the_mean_negative_logarithm() -> None:
    labels, chances = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
    expected = -(math.log(0.9) + math.log(0.8) + math.log(0.5)) / 3
    assert log_loss(labels, torch.logit(chances)) == pytest.approx(expected, abs=1e-9)
