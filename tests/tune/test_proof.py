"""Rewrites that need proof: applied only where they were timed to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxopt
from fxopt.config import Config
from fxopt.rewrites import PASSES, linear_chains
from fxopt.rewrites.framework.policy import PROVEN, Policy
from fxopt.tune.tuner import EFFORTS, Tuner, Verdict


def changes(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, tune: str = "full", policy: Policy = PROVEN) -> int:
    """How often linear_chains is applied, were this its policy and what is timed."""
    passes = tuple(replace(each, policy=policy) if each is linear_chains.REWRITE else each for each in PASSES)
    monkeypatch.setattr("fxopt.rewrites.PASSES", passes)
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: verdict)
    monkeypatch.setattr("fxopt.stages.may_be_raced", lambda *_: False)  # by whoever is faster here
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    optimized = fxopt.optimize(model, (torch.randn(3, 4),), Config(tune=tune))  # type: ignore[arg-type]
    (findings,) = optimized._fxopt.findings
    return sum(len(ran.changes) for ran in findings.passes if ran.name == "linear_chains")


@pytest.mark.parametrize(
    ("ratios", "applied"), [({1: 1.5, 16: 1.2}, 1), ({1: 1.0, 16: 1.02}, 0), ({1: 0.5, 16: 0.9}, 0), ({}, 0)]
)
def test_a_win_is_needed(monkeypatch: pytest.MonkeyPatch, ratios: dict[int, float], applied: int) -> None:
    assert changes(monkeypatch, Verdict(ratios, "no time")) == applied


def test_where_nothing_is_timed_they_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EFFORTS["off"].seconds == 0
    assert changes(monkeypatch, Verdict({1: 2.0}), "off") == 0


@pytest.mark.parametrize(("ratios", "applied"), [({1024: 0.8, 4096: 1.1}, 1), ({1024: 0.98, 4096: 1.01}, 0), ({}, 1)])
def test_a_cost_at_every_size_needs_a_gain_at_some(
    monkeypatch: pytest.MonkeyPatch, ratios: dict[int, float], applied: int
) -> None:
    large_batches = Policy(measured=True, rows=(1024, 4096))
    assert changes(monkeypatch, Verdict(ratios, "no time"), policy=large_batches) == applied
