"""A model that fills a cache at a first call (a mask, the angles of positions) is captured once the cache stands."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.runtime import dispatcher_of
from tests.runtime.models import assert_same, optimize


class Masked(nn.Module):
    """A mask for all lengths, made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(16, 16).tril()
        return x @ self.mask[: x.shape[1], : x.shape[1]]


class Rotary(nn.Module):
    """Buffers that grow with the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("angles", torch.arange(self.longest) * 0.1, persistent=False)
        return x * self.angles[: x.shape[1]].cos()


class Table:
    """An object of the user's own that keeps what was asked of it."""

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def of(self, length: int) -> Tensor:
        if self.found is None or len(self.found) < length:
            self.found = torch.arange(length) * 0.1
        return self.found[:length]


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.of(x.shape[1])


class Users(nn.Module):
    """What all users have in common is computed once for an evaluation, and anew after each step of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.users: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.users is None:
            self.users = self.layer(torch.eye(4))
        return x @ self.users


def _same_calls(model: nn.Module, fast: Any, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        x = torch.randn(3, length)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("kind", [Masked, Rotary, Helped])
def test_a_filled_cache_is_captured(kind, caplog):
    model = kind()
    fast, recorder = optimize(kind())
    with caplog.at_level(logging.WARNING):
        _same_calls(model, fast, (8, 8))
        assert (recorder.captures, recorder.runs) == (1, 0)
        assert dispatcher_of(fast).findings == [], "the reason of the first call is none any more"
        _same_calls(model, fast, (8, 7, 5, 8))
    assert recorder.runs == 4, "each call behind the second"
    assert not caplog.records, "nobody is warned of what is over"


def test_a_cache_that_grows_is_captured_again():
    model, (fast, recorder) = Rotary(), optimize(Rotary())
    _same_calls(model, fast, (4, 4, 4, 9, 9, 9, 6))
    assert recorder.runs == 3


def test_a_cache_that_grows_at_the_second_call_is_captured():
    model, (fast, recorder) = Rotary(), optimize(Rotary())
    _same_calls(model, fast, (4, 9, 9, 9, 6, 4))
    assert recorder.runs == 3


def test_a_second_call_that_raises_tells_nothing():
    fast, recorder = optimize(Masked())
    fast(torch.randn(3, 8))
    with pytest.raises(RuntimeError):
        fast(torch.randn(3, 17))
    _same_calls(Masked(), fast, (8, 8, 8))
    assert recorder.runs == 2


def test_a_cache_that_is_emptied_again_and_again_stays_eager():
    model = Users()
    fast, recorder = optimize(Users())
    fast.load_state_dict(model.state_dict())
    for _ in range(8):
        with torch.no_grad():
            for each in (model, fast):
                each.layer.weight.mul_(1.5)
                each.users = None
        _same_calls(model, fast, (4, 4, 4, 4))
    assert recorder.captures <= 5, "three that fail, and two that are soon over"
    assert dispatcher_of(fast).findings[-1].eager_reason


def test_the_first_call_has_a_reason_of_its_own():
    fast, _ = optimize(Masked())
    fast(torch.randn(3, 8))
    (findings,) = dispatcher_of(fast).findings
    assert "depends on earlier calls" in findings.eager_reason
