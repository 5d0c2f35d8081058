"""Lookups that a second collector reads again: by a call of its own without gradients, copied with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.patterns.found import Spelling, assert_eager, assert_eager_gradients, executable

IDS = torch.randint(0, 20, (7, 3))
AGAIN: dict[str, Callable[..., Any]] = {
    "beside what is made of them": lambda m, i: torch.cat(
        [m.bag(i).mul(torch.cat([m.e(i[:, 0]), m.f(i[:, 1])], 1).tanh().sum(1, True)), m.e(i[:, 0]), m.f(i[:, 1])], 1
    ),
    "beside products of their lanes": lambda m, i: torch.cat(
        [m.e((i + 3) % 20).flatten(1), m.e((i + 3) % 20)[:, [0, 2, 1]].prod(1)], 1
    ),
    "in a sum": lambda m, i: (
        torch.cat([m.e(i[:, 0]), m.f(i[:, 1])], 1).tanh().sum(1, True) * (m.e(i[:, 0]) + m.f(i[:, 1]))
    ),
    "stacked": lambda m, i: (
        torch.stack([m.e(i[:, 0]), m.f(i[:, 1])], 1).tanh().sum((1, 2))[:, None, None]
        * torch.stack([m.f(i[:, 1]), m.e(i[:, 0])], 1)
    ),
    "by other ids": lambda m, i: (
        torch.cat([m.e(i[:, 0]), m.f(i[:, 1])], 1).tanh().sum(1, True) * torch.cat([m.f(i[:, 0]), m.e(i[:, 2])], 1)
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_table_has_one_call_where_it_has_a_gradient(name: str) -> None:
    model = Spelling(AGAIN[name])
    assert_eager(executable(model, (IDS,)), model, (IDS,))
    assert_eager_gradients(model, (IDS,))  # in one call
