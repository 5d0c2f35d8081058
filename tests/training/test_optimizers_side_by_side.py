"""Two hundred steps with every optimizer, clipped, accumulated and interrupted, against eager's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of

STEPS = 200


class Net(nn.Module):
    """A sparse bag, a shared table, a frozen one, a tied layer, dropout-free but with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(60, 6, mode="sum", sparse=True)
        self.shared, self.frozen = nn.Embedding(40, 6), nn.Embedding(40, 6)
        self.frozen.requires_grad_(False)
        self.first, self.norm, self.second = nn.Linear(24, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.second.weight
        self.out = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        tables = [self.sparse(ids), self.shared(ids[:, 0]), self.shared(ids[:, 1]), self.frozen(ids[:, 2])]
        x = self.norm(torch.relu(self.first(torch.cat(tables, 1))))
        return self.out(torch.relu(self.tied(torch.relu(self.second(x)))))


class Layerwise(torch.optim.Optimizer):
    """LAMB without its details: a step as long as the layer, by the ratio of their norms."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm().clamp(min=1e-3)
                    parameter.sub_(parameter.grad * ratio.clamp(max=10.0), alpha=group["lr"])


def dense(model: Net) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p is not model.sparse.weight]


def row_wise(params: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchrec.optim.rowwise_adagrad").RowWiseAdagrad(params, lr=0.02, eps=1e-3)


def combined(model: Net) -> list[Any]:
    keyed = pytest.importorskip("torchrec.optim.keyed")
    tables = keyed.KeyedOptimizerWrapper(
        {"shared": model.shared.weight}, lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-3)
    )
    names = {
        name: p for name, p in model.named_parameters() if any(p is d for d in dense(model)) and "shared" not in name
    }
    others = keyed.KeyedOptimizerWrapper(names, lambda params: torch.optim.SGD(params, lr=0.02))
    return [keyed.CombinedOptimizer([("tables", tables), ("others", others)])]


def with_sparse(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Net], list[Any]]:
    return lambda model: [torch.optim.SparseAdam([model.sparse.weight], lr=0.002, eps=1e-2), make(dense(model))]


KINDS: dict[str, Callable[[Net], list[Any]]] = {
    "SGD for all": lambda model: [torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.02)],
    "momentum": with_sparse(lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3)),
    "Adagrad": with_sparse(lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-3)),
    "Adam": with_sparse(lambda params: torch.optim.Adam(params, lr=0.002, eps=1e-3)),
    "row-wise Adagrad": lambda model: [
        row_wise([model.shared.weight]),
        torch.optim.SGD([model.sparse.weight, *(p for p in dense(model) if p is not model.shared.weight)], lr=0.02),
    ],
    "layerwise": with_sparse(lambda params: Layerwise(params, lr=0.002)),
    "combined": combined,
}


def train(model: nn.Module, owner: Net, optimizers: list[Any]) -> list[float]:
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, 40, (8 + step % 5, 3), generator=generator)
        loss = (model(ids).squeeze(1) - ids.float().mean(1) / 20).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if step % 3 == 1:  # two batches are one step
            continue
        nn.utils.clip_grad_norm_(dense(owner), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 7:
            model.eval()
            with torch.no_grad():
                losses.append(float(model(ids).sum()))
            model.train()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_stay_eagers(kind: str) -> None:
    torch.manual_seed(0)
    eager = Net()
    model = copy.deepcopy(eager)
    optimized = fxopt.optimize(model)
    losses = train(optimized, model, KINDS[kind](model)), train(eager, eager, KINDS[kind](eager))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-3, atol=2e-3)
    for (name, mine), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    findings = dispatcher_of(optimized).findings
    assert len(findings) == 2, "one capture to train and one to evaluate"
    assert not any(found.eager_reason for found in findings)
