"""How often the dispatcher looks whether a model that stays eager could be captured now."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime import dispatcher_of
from fxopt.runtime.watch import Watch


class AsksData(nn.Module):
    """Asks its data, unless it is told not to."""

    def __init__(self, settings: int) -> None:
        super().__init__()
        self.linear, self.asks, self.chosen = nn.Linear(4, 2), True, "s1"
        self.settings = SimpleNamespace(**{f"s{k}": k for k in range(settings)})

    def forward(self, x):
        if self.asks and float(x.sum()) > 1e9:
            return x
        return self.linear(x) * getattr(self.settings, self.chosen)  # which may be any of them


def looks_in(calls, model, x, monkeypatch):
    counted = []
    holds = Watch.holds
    monkeypatch.setattr(Watch, "holds", lambda watch: counted.append(watch) or holds(watch))
    for _ in range(calls):
        model(x)
    return len(counted)


@pytest.mark.parametrize(("settings", "least", "most"), [(2, 64, 64), (2000, 1, 4)])
def test_a_long_look_is_for_more_calls(settings, least, most, monkeypatch):
    model, x = fxopt.optimize(AsksData(settings).eval()), torch.randn(3, 4)
    with torch.no_grad():
        model(x)
        assert dispatcher_of(model).entries[0].executable is None
        assert least <= looks_in(64, model, x, monkeypatch) <= most


@pytest.mark.parametrize("settings", [2, 2000])
def test_what_changes_is_captured_soon(settings):
    model, x = fxopt.optimize(AsksData(settings).eval()), torch.randn(3, 4)
    with torch.no_grad():
        model(x)
        model.asks = False
        for _ in range(1 + settings // 32):
            assert torch.allclose(model(x), model.linear(x))
        assert any(entry.executable is not None for entry in dispatcher_of(model).entries)
