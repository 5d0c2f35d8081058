"""fxopt as a torch.compile backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fxopt.integrations import dynamo
from tests.runtime.models import Tower, assert_same, tower_inputs


@pytest.fixture
def compiled(monkeypatch):
    """The callables that the backend made for Dynamo, in order."""
    torch._dynamo.reset()
    made = []

    def record(*args, **kwargs):
        made.append(dynamo.backend(*args, **kwargs))
        return made[-1]

    yield made, record
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_answers_and_gradients(compiled, dynamic):
    made, backend = compiled
    model = Tower().eval()
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend, dynamic=dynamic)
    for batch in (6, 7, 9, 1):
        inputs = tower_inputs(batch)
        out, expected = fast(*inputs), twin(*inputs)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert made and all(len(c.entries) == 1 for c in made), [c.attempts for c in made]
    if dynamic:
        assert len(made) <= 2, "one graph for the sizes above one"


def test_training_updates_buffers_and_parameters(compiled):
    made, backend = compiled
    model = Tower().train()
    model.drop.p = 0.0
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend)
    steppers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(3):
        inputs = tower_inputs(8)
        for m, stepper in zip((fast, twin), steppers, strict=True):
            stepper.zero_grad()
            m(*inputs).square().mean().backward()
            stepper.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert model.norm.num_batches_tracked == 3
    assert sum(len(c.entries) for c in made) >= 1


def test_two_instances_share_a_graph_and_not_the_weights(compiled):
    made, backend = compiled
    first, second = Tower().eval(), Tower().eval()
    run = torch.compile(lambda m, *inputs: m(*inputs), backend=backend)
    inputs = tower_inputs()
    for model in (first, second, first):
        with torch.no_grad():
            torch.testing.assert_close(run(model, *inputs), model(*inputs))
    assert not torch.equal(first(*inputs), second(*inputs))
    assert made


def test_a_size_used_as_a_value_and_a_changing_float(compiled):
    _, backend = compiled

    class Sized(nn.Module):
        def forward(self, x, scale):
            return x.reshape(-1).sum() / x.shape[0] + x.shape[1] * scale

    model = Sized()
    fast = torch.compile(model, backend=backend, dynamic=True)
    for rows, columns, scale in ((3, 4, 0.5), (5, 4, 0.5), (5, 7, 2.5), (9, 9, -1.0)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(fast(x, scale), model(x, scale))


def test_what_cannot_be_captured_runs_as_it_is(compiled):
    made, backend = compiled

    def model(x):
        return x[x > 0].sum() * 2

    fast = torch.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randn(10)
        assert_same(fast(x), model(x))
    assert made


def test_errors_are_those_of_eager(compiled):
    _, backend = compiled
    model = Tower().eval()
    fast = torch.compile(model, backend=backend)
    dense, ids = tower_inputs()
    fast(dense, ids)
    with pytest.raises(IndexError):
        fast(dense, ids + 100)
    torch.testing.assert_close(fast(dense, ids), model(dense, ids))


def test_options_reach_the_config(compiled):
    made, backend = compiled
    model = Tower().eval()
    fast = torch.compile(model, backend=backend, options={"verify": "off", "max_captures": 3})
    fast(*tower_inputs())
    assert made[0].config.verify == "off" and made[0].config.max_captures == 3


def test_a_capture_draws_nothing(compiled, monkeypatch, tmp_path):
    """Trials draw random numbers where no timing is remembered."""
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    _, backend = compiled
    model, inputs = Tower().eval(), tower_inputs(6)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch.compile(model, backend=backend)(*inputs)
    assert torch.equal(torch.get_rng_state(), before)
