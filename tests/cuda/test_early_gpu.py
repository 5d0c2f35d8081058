"""Kernels that start before the one in front of them on the stream is done read what it writes, and not before."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import fxopt
from fxopt.kernels.mlp.cuda.linear import gpu_linear

pytestmark = pytest.mark.gpu
STEPS = 40


class Steps:
    """Calls that each read all of `x` [256, 48] and write it anew, by our launches, torch's, copies and fills."""

    def __init__(self, seed: int) -> None:
        draw, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
        self.start = torch.randn(256, 48, device="cuda", generator=generator)
        self.weights = [torch.randn(48, 48, device="cuda", generator=generator) / 5 for _ in range(STEPS)]
        self.kinds = [
            draw.choice(["ours", "ours", "ours", "product", "in place", "copy", "fill", "one"]) for _ in range(STEPS)
        ]

    def __call__(self, x: torch.Tensor, ours: bool) -> torch.Tensor:
        for weight, kind in zip(self.weights, self.kinds, strict=True):
            if kind == "ours":
                x = gpu_linear(x, weight, None, "relu") if ours else torch.relu(x @ weight.t())
            elif kind == "product":
                x = x @ weight
            elif kind == "in place":
                x.mul_(1.5).add_(0.25)
            elif kind == "copy":
                x = x.clone()
            elif kind == "fill":
                x[:, 7].fill_(0.5)
            else:
                one = gpu_linear(x, weight[:1], None, "sigmoid") if ours else torch.sigmoid(x @ weight[:1].t())
                x[:, :1] += one
        return x


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("seed", range(6))
def test_results_are_those_of_one_launch_after_the_other(seed):
    steps = Steps(seed)
    with torch.no_grad():
        expected = steps(steps.start.clone(), ours=False)
        stream, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), steps.start.clone()
        with torch.cuda.stream(stream):
            for _ in range(20):
                assert_alike(steps(steps.start.clone(), ours=True), expected)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = steps(x.copy_(steps.start), ours=True)
        first = None
        for _ in range(50):
            graph.replay()
            first = found.clone() if first is None else first
            assert torch.equal(found, first)
        assert_alike(first, expected)


class Lookups(nn.Module):
    """Ids and a dense layer that the launch right before the columns makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 16) for _ in range(40))
        self.dense = nn.Linear(32, 16)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ids = ids * 7 % 1000
        return torch.cat([torch.relu(self.dense(dense)), *(t(ids[:, k]) for k, t in enumerate(self.tables))], 1)


def test_columns_behind_the_launches_that_make_their_inputs():
    model, generator = Lookups().cuda().eval(), torch.Generator("cuda").manual_seed(3)
    dense = torch.randn(512, 32, device="cuda", generator=generator)
    ids = torch.randint(0, 1000, (512, 40), device="cuda", generator=generator)
    with torch.no_grad():
        fast, graph = fxopt.optimize(model, (dense, ids)), torch.cuda.CUDAGraph()
        fast(dense, ids)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = fast(dense, ids)
        for _ in range(50):
            dense.normal_(generator=generator)
            ids.random_(0, 1000, generator=generator)
            graph.replay()
            torch.testing.assert_close(found, model(dense, ids), rtol=1e-4, atol=1e-4)
