"""Operators of ours called with what nobody should pass, and models whose axes become empty: errors, never a crash."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from tests.kernels.calls import calls


def test_every_operator_is_called():
    """A new one needs a line in calls.py."""
    called = {call.name for call in calls()}
    defined = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fxopt::")
    }
    on_cuda = ("gpu_", "gathered_", "stage", "mlp_chains", "columns_entries", "columns_dots")
    elsewhere = {name for name in defined if name.startswith(on_cuda)}
    assert defined - elsewhere <= called


@pytest.mark.slow
def test_nothing_crashes():
    words = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.hostile", "--share", "40"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


class Behind(nn.Module):
    """A model behind a cat: of a user's own tensors nobody knows the strides, which keeps kernels away."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, w: Tensor) -> Any:
        return self.model(torch.cat([x, x.sin()], 1), torch.cat([w, w.cos()], 1))


class Broadcast(nn.Module):
    """An output that is broadcast, too, along an axis that becomes empty."""

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) * 2
        return y.view(y.shape[0], 1, y.shape[1], 1), y.unsqueeze(2) * w.unsqueeze(1)


class Gates(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.sigmoid(torch.tanh(x) * 2 + 1)
        return y, torch.tanh(y.unsqueeze(2) * w.unsqueeze(1) * 2) + 1, torch.relu(w.unsqueeze(2) - y.unsqueeze(1))


class Softmax(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        weights = torch.softmax(x * 0.5 + 1, 1)
        return weights * 2, (weights * x).sum(1) + 1, torch.sigmoid(w)


class Extremum(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(w * 2 + 1).sum(1, keepdim=True) + (torch.tanh(x) * 2).amax(1, keepdim=True)


class Mean(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(w * 2 + 1) + (torch.tanh(x) * 2).mean(1, keepdim=True)


class Norm(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        pair = (x * 2).unsqueeze(2) + torch.exp(w).unsqueeze(1)
        return pair.square().sum(2).sqrt() / (1 + x.abs())


class Attention(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        keys, values = torch.stack([x, x * 2, x.sin()], 2), torch.stack([x, x.cos()], 2)
        scores = torch.softmax(w[:, None, :3] @ keys.transpose(1, 2) * 0.5, -1)
        return scores @ values


class Pairs(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        z = x.unsqueeze(2) * w.unsqueeze(1)
        return 0.5 * (z.sum(1).square() - z.square().sum(1)).sum(1, keepdim=True)


class Dots(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        z = torch.stack([w, w * 2, w.sin()], 1)
        i, j = torch.triu_indices(3, 3, 1)
        return torch.cat([x, torch.bmm(z, z.transpose(1, 2))[:, i, j]], 1)


class Largest(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.topk(x, 2, 1).values * 2 + torch.topk(x * 3, 2, 1).values


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        rows = x.unsqueeze(2) * w.unsqueeze(1)
        return torch.stack([expert(rows) for expert in self.experts], 2)


class Histories(nn.Module):
    """Lookups and their pooling, with padded lengths that become 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(3))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        ids = (x.abs() * 3).long().clamp(max=8)
        parts = [self.tables[0](ids).sum(1), self.tables[1](ids).mean(1), self.tables[2](ids[:, :1]).flatten(1)]
        return torch.cat([*parts, w], 1)


MODELS = (Broadcast, Gates, Softmax, Extremum, Mean, Norm, Attention, Pairs, Dots, Largest, Layers, Histories)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("verify", ["first", "off"])
def test_axes_that_become_empty(model, verify):
    torch.manual_seed(0)
    eager = Behind(model()).eval()
    optimized = fxopt.optimize(
        Behind(model()).eval(), (torch.randn(5, 6), torch.randn(5, 4)), fxopt.Config(verify=verify)
    )
    optimized.load_state_dict(eager.state_dict())
    with torch.no_grad():
        for rows, length in ((5, 6), (5, 0), (0, 6), (0, 0), (1, 1), (1, 0), (2, 3), (300, 0)):
            given = torch.randn(rows, length), torch.randn(rows, 4)
            _same(lambda x, w: eager(x, w), lambda x, w: optimized(x, w), given)


def _same(eager, optimized, given) -> None:
    try:
        expected = eager(*given)
    except Exception as error:
        with pytest.raises(type(error)):
            optimized(*given)
        return
    torch.testing.assert_close(optimized(*given), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
