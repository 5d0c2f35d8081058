"""Generated pointwise kernels on a GPU: against the reference in float64, in graphs, and inside models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.kernels import cuda_build
from fxopt.kernels.pointwise import cuda, reference
from fxopt.kernels.pointwise.encode import text
from fxopt.runtime import dispatcher_of
from tests.cuda.generated import exact
from tests.cuda.test_pointwise_shim import TOGETHER, assert_alike, calls_of_sizes, every_step, random_cases
from tests.kernels.test_pointwise import SOFTMAX

pytestmark = pytest.mark.gpu


def to_gpu(tensors):
    """With the strides that they have."""
    moved = []
    for tensor in tensors:
        space = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        moved.append(space.copy_(tensor))
    return moved


@pytest.mark.parametrize("wide", [False, True])
def test_random_plans(monkeypatch, wide):
    monkeypatch.setattr(cuda, "is_wide", lambda inputs, sizes: wide)
    for seed, plan, batches, _ in random_cases(range(5, 11) if wide else range(30), (0, 1, 3, 70, 5000)):
        for inputs in batches:
            kernel = cuda_build.loaded(cuda.generated(text(plan), tuple(x.dtype for x in inputs), wide), 0)
            assert kernel is not None
            found = cuda.pointwise_on_cuda(to_gpu(inputs), text(plan))
            for given, expected in zip(found, exact(inputs, plan), strict=True):
                torch.testing.assert_close(given.double().cpu(), expected, rtol=2e-5, atol=2e-5, msg=f"seed {seed}")


def test_special_values():
    plan, inputs = every_step()
    found = cuda.pointwise_on_cuda(to_gpu(inputs), text(plan))
    for step, given, expected in zip(plan.steps[2:], found, reference.pointwise(to_gpu(inputs), plan), strict=True):
        assert_alike(given, expected, step.op)


def test_a_replay_sees_new_numbers():
    x, w = torch.randn(300, 40, device="cuda"), torch.randn(40, device="cuda")
    cuda.pointwise_on_cuda([x, w], text(SOFTMAX))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda.pointwise_on_cuda([x * 2, w], text(SOFTMAX))
        after = found[0] + 1  # starts once the kernel is done
    x.normal_()
    for _ in range(3):
        graph.replay()
    expected = exact([x * 2, w], SOFTMAX)
    torch.testing.assert_close([y.double() for y in found], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after, found[0] + 1)


@pytest.mark.parametrize(("plan", "sizes"), TOGETHER)
def test_calls_of_one_plan_as_one_launch(plan, sizes):
    inputs = calls_of_sizes(sizes)
    kernel = cuda_build.loaded(cuda.kernel_of(text(plan), inputs), 0)
    assert kernel is not None
    found = cuda.pointwise_on_cuda(to_gpu(inputs), text(plan))
    calls = [exact(call, plan) for call in reference.calls_of(inputs, plan)]
    for given, expected in zip(found, [output for call in calls for output in call], strict=True):
        torch.testing.assert_close(given.double().cpu(), expected, rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """Layers with batch norms that a softmax of a gate with one weighs: a launch for all ends of layers."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(37, 160), nn.BatchNorm1d(160), nn.ReLU()) for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(37, experts), nn.BatchNorm1d(experts)) for _ in range(2))

    def forward(self, x):
        rows = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.cat([(gate(x).softmax(1)[:, :, None] * rows).sum(1) for gate in self.gates], 1)


@pytest.mark.timed
@torch.no_grad()
def test_the_ends_of_layers_side_by_side():
    model, x = Experts().cuda().train(), torch.randn(300, 37, device="cuda")
    model(x)
    fast = fxopt.optimize(model.eval(), (x,), fxopt.Config(cuda_graphs=False))
    for batch in (300, 1, 0, 17):
        x = torch.randn(batch, 37, device="cuda")
        expected = model.double()(x.double())
        model.float()
        torch.testing.assert_close(fast(x).double(), expected, rtol=2e-5, atol=1e-6)
    (entry, *_) = dispatcher_of(fast).entries
    assert not any(ran.rolled_back for ran in entry.findings.passes)


def test_gradients_are_pytorchs():
    x, w = torch.randn(5, 7, device="cuda", requires_grad=True), torch.randn(7, device="cuda")
    (grad,) = torch.autograd.grad(cuda.pointwise_on_cuda([x, w], text(SOFTMAX))[0].square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(torch.softmax(x * w, 1).square().sum(), x)[0])


class Pairs(nn.Module):
    """Products of pairs by weights of their own, squeezed and normalised: a loop, and what stands behind it."""

    def __init__(self, fields: int = 12, dim: int = 8) -> None:
        super().__init__()
        self.pairs = [(i, j) for i in range(fields) for j in range(i)]
        self.weights = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in self.pairs)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        rows = [self.weights[k](x[:, i]) * x[:, j] for k, (i, j) in enumerate(self.pairs)]
        both = self.norm(torch.stack(rows, 1))
        return torch.softmax((both * torch.sigmoid(both)).sum(2), 1)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_model_gives_eagers_numbers(cuda_graphs):
    model, x = Pairs().cuda().eval(), torch.randn(64, 12, 8, device="cuda")
    with torch.no_grad():
        fast = fxopt.optimize(model, (x,), fxopt.Config(cuda_graphs=cuda_graphs))
        for batch in (64, 1, 3, 257, 0):
            x = torch.randn(batch, 12, 8, device="cuda")
            expected = model.double()(x.double())
            model.float()
            for _ in range(3):
                torch.testing.assert_close(fast(x).double(), expected, rtol=2e-5, atol=1e-6)
    (entry, *_) = dispatcher_of(fast).entries
    assert not any(ran.rolled_back for ran in entry.findings.passes)
