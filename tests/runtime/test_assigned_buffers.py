"""Buffers that a forward assigns, and of which it asks only the form: None, sizes, dtype, strides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Config
from fxopt.runtime import dispatcher_of


class Assigns(nn.Module):
    def __init__(self, first: Tensor | None, following: Callable[[nn.Module, Tensor], Tensor | None]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("kept", first)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.following = following

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.following(self, x)
        return self.layers(x) if self.kept is None else self.layers(x) + self.kept.float().sum()


def _longer(model: nn.Module, x: Tensor) -> Tensor:
    return torch.ones(model.kept.shape[0] + 1)


def _long_enough(model: nn.Module, x: Tensor) -> Tensor:
    return model.kept if len(model.kept) >= len(x) else x.new_ones(len(x) + 1)


def _other_dtype(model: nn.Module, x: Tensor) -> Tensor:
    return torch.ones(2, dtype=torch.float64 if model.kept.dtype == torch.float32 else torch.float32)


def _made_once(model: nn.Module, x: Tensor) -> Tensor:
    return x.detach().sum(0) if model.kept is None else model.kept


def _comes_and_goes(model: nn.Module, x: Tensor) -> Tensor | None:
    return torch.ones(2) if model.kept is None else None


def _by_its_dict(model: nn.Module, x: Tensor) -> Tensor:
    return torch.ones(1 + len(dict(model.named_buffers())["kept"]))


def _by_get(model: nn.Module, x: Tensor) -> Tensor:
    return torch.ones(1 + len(model._buffers.get("kept")))


def _moves(model: nn.Module, x: Tensor) -> Tensor:
    return model.kept * 0.5 + x.detach().mean()


CASES = {
    "longer": (torch.ones(3), _longer),
    "long enough": (torch.ones(3), _long_enough),
    "other dtype": (torch.ones(2), _other_dtype),
    "made once": (None, _made_once),
    "comes and goes": (None, _comes_and_goes),
    "by its dict": (torch.ones(3), _by_its_dict),
    "by get": (torch.ones(3), _by_get),
    "moves": (torch.ones(3), _moves),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_form_of_an_assigned_buffer_is_eagers(name: str, grad: bool) -> None:
    eager = Assigns(*CASES[name])
    fast = fxopt.optimize(copy.deepcopy(eager), config=Config(verify="off", tune="off"))
    for rows in (3, 5, 2, 8, 4, 1):
        x = torch.randn(rows, 4)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(fast(x), eager(x))
        assert (fast.kept is None) == (eager.kept is None)
        if eager.kept is not None:
            torch.testing.assert_close(fast.kept, eager.kept)


def test_a_buffer_that_is_only_written_may_change_its_form() -> None:
    fast = fxopt.optimize(Assigns(torch.ones(3), lambda model, x: x.detach().sum(1)), config=Config(verify="off"))
    for rows in (3, 5, 2, 8):
        fast(torch.randn(rows, 4))
        assert fast.kept.shape == (rows,)
    assert len(dispatcher_of(fast).entries) == 1


def test_a_buffer_of_none_that_is_set_later() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", None)
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y if self.shift is None else y + self.shift

    eager, x = Shifts(), torch.randn(3, 4)
    fast = fxopt.optimize(copy.deepcopy(eager))
    torch.testing.assert_close(fast(x), eager(x))
    for model in (eager, fast):
        model.shift = torch.ones(2)
    torch.testing.assert_close(fast(x), eager(x))


def test_a_buffer_of_none_that_is_only_written() -> None:
    fast = fxopt.optimize(Assigns(None, lambda model, x: x.detach().sum(1)), config=Config(verify="off"))
    for rows in (3, 5, 2, 8):
        fast(torch.randn(rows, 4))
        assert fast.kept.shape == (rows,)
    assert [entry.findings.eager_reason for entry in dispatcher_of(fast).entries] == [""]
