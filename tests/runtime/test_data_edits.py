"""Edits through .data are no versions of the tensor: a backward works, or refuses to, where eager's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Config


class Model(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.run, self.online, self.target, self.table = run, nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(5, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.run(self, x, ids)


def moving_average(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    m.target.weight.data.mul_(0.9).add_(m.online.weight.data * 0.1)
    return m.online(x) * m.target(x)


def moving_average_afterwards(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found = m.online(x) * m.target(x)
    m.target.weight.data.mul_(0.9).add_(m.online.weight.data, alpha=0.1)
    return found


def decay_between(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    hidden = m.online(x).relu()
    m.online.weight.data.mul_(0.5)
    return m.online(hidden).relu()


def rows_between(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    hidden = m.online(x).relu()
    m.online.weight.data[0].zero_()
    m.online.weight.data.t()[1:].mul_(2)
    return m.online(hidden).relu()


def clamp_before_each_layer(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    for layer in (m.online, m.target, m.online):
        layer.weight.data.clamp_(min=0)
        x = layer(x).relu()
    return x


def padding_rows(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    m.table.weight.data[0].zero_()
    found = m.table(ids) * x
    m.table.weight.data[1].fill_(2.0)
    return found * m.table(ids)


def an_activation(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    hidden = m.online(x).sigmoid()
    squares = hidden * hidden
    hidden.data.mul_(0.5)
    return squares + m.target(hidden)


def an_input(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found = m.online(x) * x
    x.data.mul_(2)
    return found * m.target(x)


def data_of_data(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found, data = m.online(x), m.online.weight.data
    twice = data.data
    data.mul_(0.9)
    twice.add_(0.01)
    return found * m.online(found)


def refused_in_no_grad(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found = m.target(m.online(x))
    with torch.no_grad():
        m.target.weight.mul_(0.9)
    return found


def refused_through_detach(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found = m.target(m.online(x))
    m.target.weight.detach().mul_(0.9)
    return found


def refused_of_a_buffer(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    found = m.online(x) * m.scale
    m.scale.add_(1)
    return found * m.scale


ALLOWED = (
    moving_average, moving_average_afterwards, decay_between, rows_between, clamp_before_each_layer, padding_rows,
    an_activation, an_input, data_of_data,
)  # fmt: skip
REFUSED = (refused_in_no_grad, refused_through_detach, refused_of_a_buffer)


def called(model: nn.Module, x: Tensor, ids: Tensor) -> tuple[list[Tensor], list[int], str]:
    """What a step leaves: values, versions, and what its backward refuses."""
    x, error = x.clone(), ""
    model.zero_grad()
    found = model(x, ids)
    try:
        found.sum().backward()
    except RuntimeError as raised:
        error = str(raised)[:40]
    state = [*model.parameters(), *model.buffers()]
    grads = [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    values = [t.detach().clone() for t in (found, x, *state, *grads)]
    return values, [t._version for t in (found, x, *state)], error


@pytest.mark.parametrize("verify", ["off", "first"])
@pytest.mark.parametrize("run", (*ALLOWED, *REFUSED))
def test_a_step_is_eagers(run: Callable[..., Tensor], verify: Any) -> None:
    eager, own = Model(run), Model(run)
    fast = fxopt.optimize(own, None, Config(tune="off", verify=verify))
    for batch in (4, 4, 3, 1):
        x, ids = torch.randn(batch, 4), torch.randint(0, 5, (batch,))
        values, versions, error = called(eager, x, ids)
        found, found_versions, found_error = called(fast, x, ids)
        torch.testing.assert_close(found, values)
        assert (found_versions, found_error) == (versions, error)
        assert bool(error) == (run in REFUSED)
    assert not any(findings.eager_reason for findings in fast._fxopt.findings)
