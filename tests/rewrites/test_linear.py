"""linear: oneDNN or torch's BLAS by batch size, the same numbers within the error budget, gradients by torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize
from fxopt.kernels.linear import op
from fxopt.rewrites import linear


@pytest.fixture
def from_batch_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if oneDNN had been measured faster from batch 4 on."""
    monkeypatch.setattr(linear, "threshold", lambda features, outputs, threads: 4)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 64), nn.ReLU(inplace=True), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3, bias=False)
    )


needs_onednn = pytest.mark.skipif(not op.available(), reason="this torch has no oneDNN linear")


@needs_onednn
@pytest.mark.usefixtures("from_batch_4")
@pytest.mark.parametrize("shape", [(0, 13), (1, 13), (3, 13), (4, 13), (65, 13), (2, 3, 13), (0, 3, 13)])
def test_no_further_from_fp64_than_eager(shape: tuple[int, ...]) -> None:
    model = mlp()
    fast = optimize(model, (torch.randn(shape),))
    (ran,) = [ran for ran in fast._fxopt.findings[0].passes if ran.name == "linear"]
    assert len(ran.changes) == 3
    left = {
        str(node.target) for node in fast._fxopt.entries[0].executable.graph.graph.nodes if node.op == "call_function"
    }
    assert left == {"fxopt.linear.default"}, "neither a linear nor an in-place relu stays behind"
    x = torch.randn(shape)
    with torch.no_grad():
        exact, eager, found = mlp_in_double(model, x), model(x), fast(x)
    assert found.shape == eager.shape
    rounding = 8 * torch.finfo(torch.float32).eps * exact.abs().amax().item() if exact.numel() else 0.0
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + rounding if exact.numel() else True


def mlp_in_double(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).double()(x.double())


@needs_onednn
@pytest.mark.usefixtures("from_batch_4")
def test_gradients_are_eagers() -> None:
    model = mlp()
    fast = optimize(model)
    x = torch.randn(9, 13)
    for net in (model, fast):
        model.zero_grad()
        net(x).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        if net is model:
            expected = grads
    torch.testing.assert_close(grads, expected)


@needs_onednn
@pytest.mark.usefixtures("from_batch_4")
def test_a_linear_read_twice_keeps_its_own_value() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.relu() - y

    model, x = Twice(), torch.randn(16, 8)
    with torch.no_grad():
        torch.testing.assert_close(optimize(model)(x), model(x))


@needs_onednn
@pytest.mark.parametrize("relu", [False, True])
def test_the_operator_by_itself(relu: bool) -> None:
    op.load()
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 4, 5), (6, 5), (6,)))
    for bias_or_none in (bias, None):
        torch.library.opcheck(torch.ops.fxopt.linear.default, (x, weight, bias_or_none, relu, 4))
    leaves = (x, weight, bias)
    expected = torch.nn.functional.linear(*leaves)
    expected = expected.relu() if relu else expected
    found = torch.ops.fxopt.linear(*leaves, relu, 4)
    cotangent = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    )


def test_threshold_is_a_probe_or_never() -> None:
    assert op.threshold(32, 16, torch.get_num_threads()) in (None, *op.PROBES)


def test_other_dtypes_are_left_alone() -> None:
    fast = optimize(mlp().double(), (torch.randn(4, 13, dtype=torch.float64),))
    (ran,) = [ran for ran in fast._fxopt.findings[0].passes if ran.name == "linear"]
    assert not ran.changes and ran.misses
