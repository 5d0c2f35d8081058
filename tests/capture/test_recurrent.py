"""GRU, LSTM and RNN: one capture for every length, with eager's results, strides, gradients and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.runtime import dispatcher_of

CONFIG = Config(tune="off")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "both ways": {"bidirectional": True, "batch_first": True},
    "two layers": {"num_layers": 2},
    "no bias": {"bias": False, "batch_first": True},
    "all": {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True},
}


class Model(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **form: Any) -> None:
        super().__init__()
        self.layer = kind(5, 3, **form)

    def forward(self, x: Tensor, initial: Any = None) -> tuple[Tensor, Any]:
        states, last = self.layer(x, initial)
        return states * 2, last


def flat(results: tuple[Tensor, Any]) -> list[Tensor]:
    states, last = results
    return [states, *(last if isinstance(last, tuple) else (last,))]


def outcome(model: nn.Module, *inputs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    results = flat(model(*inputs))
    sum(each.square().sum() for each in results).backward()  # type: ignore[union-attr]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*(each.detach() for each in results), *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("form", FORMS)
def test_one_capture_for_every_length(kind: type[nn.RNNBase], form: str) -> None:
    model = Model(kind, **FORMS[form])
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for sizes in ((4, 6), (3, 9), (7, 2), (5, 5), (1, 4), (6, 1)):
        x = torch.rand(*sizes, 5)
        torch.testing.assert_close(outcome(fast, x), outcome(model, x))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None
    assert entry.executable.capture.inputs[0].dims[:2] == ("s10", "s2")


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_results_lie_as_eagers(kind: type[nn.RNNBase]) -> None:
    model = Model(kind, batch_first=True).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for sizes in ((4, 6), (3, 9)):
            found, expected = flat(fast(torch.rand(*sizes, 5))), flat(model(torch.rand(*sizes, 5)))
            assert [each.stride() for each in found] == [each.stride() for each in expected]


def test_given_states() -> None:
    model = Model(nn.LSTM, batch_first=True)
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for batch, length in ((4, 6), (3, 9), (2, 5)):
        x, initial = torch.rand(batch, length, 5), (torch.rand(1, batch, 3), torch.rand(1, batch, 3))
        torch.testing.assert_close(outcome(fast, x, initial), outcome(model, x, initial))
    assert len(dispatcher_of(fast).entries) == 1


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Model(nn.GRU), (6, 5)),
        (Model(nn.LSTM, proj_size=2, batch_first=True), (4, 6, 5)),
        (Model(nn.GRU).double(), (4, 6, 5)),
    ],
    ids=["one sequence", "projected", "double"],
)
def test_others(model: nn.Module, sizes: tuple[int, ...]) -> None:
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for _ in range(2):
        x = torch.rand(*sizes, dtype=next(model.parameters()).dtype)
        torch.testing.assert_close(outcome(fast, x), outcome(model, x))


@pytest.mark.parametrize("sizes", [(4, 6, 7), (0, 6, 5), (4, 0, 5)])
def test_errors_are_eagers(sizes: tuple[int, ...]) -> None:
    model = Model(nn.GRU, batch_first=True)
    fast = optimize(copy.deepcopy(model), torch.rand(4, 6, 5), CONFIG)
    for each in (model, fast):
        try:
            found = str([result.shape for result in flat(each(torch.rand(*sizes)))])
        except RuntimeError as error:
            found = str(error)
        if each is model:
            expected = found
    assert found == expected
