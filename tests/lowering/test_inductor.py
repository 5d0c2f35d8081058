"""Config(lower="inductor"): one artifact for every batch size, and the fx path wherever it does not hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import Config
from fxopt.lowering import compiled
from fxopt.lowering.inductor import compile_graph
from fxopt.rewrites import PASSES

BATCHES = (6, 1, 0, 33, 257)
INDUCTOR = Config(lower="inductor", disable=("crosses", "pointwise", "row_chunks"))  # which would leave nothing


class Gated(nn.Module):
    """A lookup, two products, and a pointwise chain with a reduction between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(8, 16), nn.Linear(16, 4), nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(16)
        self.norm.running_mean = torch.rand(16)

    def forward(self, x, ids):
        h = self.norm(self.first(x + self.table(ids)))
        gate = torch.sigmoid(h * h.mean(1, keepdim=True))
        return self.last(gate * h + (1 - gate) * torch.tanh(h))


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 8), torch.randint(0, 10, (batch,))


def lowering(model: nn.Module) -> list:
    """What the findings of each capture say."""
    found = (ran for findings in model._fxopt.findings for ran in findings.passes if ran.name == "lowering")
    return [ran.misses[0].reason if ran.misses else ran.changes[0].what for ran in found]


def skip_without_compiler(model: nn.Module) -> None:
    (said,) = lowering(model)
    if "InvalidCxxCompiler" in said or "CppCompileError" in said:
        pytest.skip(said)
    assert "compiled call" in said


@pytest.fixture
def calls(monkeypatch):
    """Grows at each call of compiled code."""
    made: list[int] = []

    def counting(*args, **kwargs):
        run = compile_graph(*args, **kwargs)
        return lambda *arguments: made.append(1) or run(*arguments)

    monkeypatch.setattr(compiled, "compile_graph", counting)
    return made


def test_answers_at_every_batch_size_and_layout(calls):
    model = Gated().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        fast = fxopt.optimize(model, inputs(6), INDUCTOR)
        skip_without_compiler(fast)
        for batch in BATCHES:
            args = inputs(batch)
            calls.clear()
            torch.testing.assert_close(fast(*args), twin(*args))
            assert calls or batch == 0
        turned = torch.randn(8, 12).t()
        ids = torch.randint(0, 10, (12,))
        torch.testing.assert_close(fast(turned, ids), twin(turned, ids))
        for m in (model, twin):
            m.load_state_dict({name: value * 1.5 if value.is_floating_point() else value
                               for name, value in twin.state_dict().items()})  # fmt: skip
        torch.testing.assert_close(fast(*args), twin(*args))
    assert all(entry.executable is not None for entry in fast._fxopt.entries)


def test_training_steps(calls):
    model = Gated().eval()
    twin = copy.deepcopy(model)
    fast = fxopt.optimize(model, inputs(6), INDUCTOR)
    skip_without_compiler(fast)
    steppers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (fast, twin)]
    for batch in (6, 9):
        args = inputs(batch)
        for m, stepper in zip((fast, twin), steppers, strict=True):
            stepper.zero_grad()
            m(*args).square().mean().backward()
            stepper.step()
    assert calls
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
    x, ids = inputs(5)
    grads = [torch.autograd.grad(m(x, ids).sum(), leaf)[0] for m in (fast, twin) for leaf in [x.requires_grad_()]]
    torch.testing.assert_close(*grads)  # x wanted none in the capture


def test_why_a_graph_stays_as_it_was():
    class Plain(nn.Module):
        def forward(self, x):
            return x @ x.t()

    with torch.no_grad():
        (said,) = lowering(fxopt.optimize(Plain(), (torch.randn(3, 3),), INDUCTOR))
    assert "no two neighbours" in said


def test_a_compiler_that_fails_leaves_the_fx_path(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no space left")

    monkeypatch.setattr(compiled, "compile_graph", broken)
    model = Gated().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, inputs(6), INDUCTOR)
        args = inputs(7)
        torch.testing.assert_close(fast(*args), model(*args))
    assert lowering(fast) == ["Inductor failed, RuntimeError: no space left"]


def test_the_field_is_checked():
    with pytest.raises(ValueError, match="lower"):
        Config(lower="cuda")


def test_the_report_says_what_could_be_compiled():
    class Chain(nn.Module):
        def forward(self, x):
            return torch.softmax(torch.tanh(x) * torch.sigmoid(x) + x.exp() - x.mean(1, keepdim=True), 1)

    every = tuple(rewrite.name for rewrite in PASSES)
    with torch.no_grad():
        fast = fxopt.optimize(Chain(), (torch.randn(3, 5),), Config(disable=every))
    (found,) = [ran for ran in fxopt.report(fast).signatures[0].passes if ran.name == "lowering"]
    assert '8 operators could be 1 compiled calls: Config(lower="inductor")' in found.misses[0].text
