"""The dense side of recommendation models in plain PyTorch, in the spellings that people publish.

Letters: B batch, F features, D dim of an embedding, L positions of a sequence, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 1000


@dataclass(frozen=True)
class Entry:
    """A model to measure, with the names that a zoo's entries have. batches: the ones it is measured at; renew: makes
    the same arguments without what an earlier call has kept in them."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], tuple]
    batches: tuple[int, ...] = (1, 256, 4096)
    renew: Callable[[tuple], tuple] = lambda args: args

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()

    def make_inputs(self, batch: int, seed: int, model: nn.Module) -> tuple:
        return self.inputs(batch, torch.Generator().manual_seed(seed * 7919 + batch))

    def fresh(self, args: tuple) -> tuple:
        return self.renew(args)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DIN(nn.Module):
    """Target attention (Zhou et al., arXiv:1706.06978): every position of a padded sequence against the candidate."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, dim)
        self.attention, self.top = mlp(4 * dim, 80, 40, 1), mlp(2 * dim, 200, 80, 1)

    def forward(self, item: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        keys, query = self.items(history), self.items(item)
        queries = query.unsqueeze(1).expand_as(keys)
        scores = self.attention(torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)).squeeze(-1)
        mask = torch.arange(history.shape[1], device=history.device)[None, :] < lengths[:, None]
        weights = torch.softmax(scores.masked_fill(~mask, -1e9), dim=1)
        pooled = torch.bmm(weights.unsqueeze(1), keys).squeeze(1)
        return torch.sigmoid(self.top(torch.cat([query, pooled], dim=1)))


class MMoE(nn.Module):
    """Experts mixed by a gate for each task (Ma et al., KDD 2018)."""

    def __init__(self, width: int = 128, experts: int = 8, tasks: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(mlp(width, 64, 32), nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(mlp(32, 16, 1) for _ in range(tasks))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        weights = [torch.softmax(gate(x), dim=1).unsqueeze(1) for gate in self.gates]
        mixed = [torch.bmm(weight, experts).squeeze(1) for weight in weights]
        return tuple(tower(z) for tower, z in zip(self.towers, mixed, strict=True))


class FiBiNET(nn.Module):
    """Squeeze-excite and bilinear pairs in a Python loop (Huang et al., arXiv:1905.09433)."""

    def __init__(self, fields: int = 26, dim: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(fields))
        self.squeeze = nn.Sequential(nn.Linear(fields, 8), nn.ReLU(), nn.Linear(8, fields), nn.ReLU())
        pairs = fields * (fields - 1) // 2
        self.bilinear = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(pairs))
        self.top = mlp(2 * pairs * dim, 128, 1)

    def pairs(self, x: Tensor) -> Tensor:
        vectors = torch.split(x, 1, dim=1)
        layers = zip(self.bilinear, combinations(vectors, 2), strict=True)
        return torch.cat([layer(a) * b for layer, (a, b) in layers], dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        excited = x * self.squeeze(x.mean(dim=-1)).unsqueeze(2)
        return torch.sigmoid(self.top(torch.cat([self.pairs(x), self.pairs(excited)], dim=1).flatten(1)))


class FFM(nn.Module):
    """Field-aware factorization machine: a table for each field, products of all pairs (Juan et al., RecSys 2016)."""

    def __init__(self, fields: int = 26, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Embedding(ROWS, 1)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(fields))

    def forward(self, ids: Tensor) -> Tensor:
        xs = [table(ids) for table in self.tables]
        products = [xs[j][:, i] * xs[i][:, j] for i, j in combinations(range(len(xs)), 2)]
        return torch.sigmoid(self.linear(ids).sum(1) + torch.stack(products, dim=1).sum(1).sum(1, keepdim=True))


class ONN(nn.Module):
    """Operation-aware pairs: a table for each (field, operation), inner products in a loop, then an MLP
    (Yang et al., arXiv:1904.12579)."""

    def __init__(self, fields: int = 20, dim: int = 8) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(fields * (fields - 1) // 2))
        self.right = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(fields * (fields - 1) // 2))
        self.fields = fields
        self.top = mlp(len(self.left), 128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        pairs = zip(self.left, self.right, combinations(range(self.fields), 2), strict=True)
        dots = [(a(ids[:, i]) * b(ids[:, j])).sum(dim=1, keepdim=True) for a, b, (i, j) in pairs]
        return torch.sigmoid(self.top(torch.cat(dots, dim=1)))


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors beside the dense one, as in DLRM (Naumov et al., arXiv:1906.00091)."""

    def __init__(self, features: int = 27) -> None:
        super().__init__()
        self.i, self.j = torch.tril_indices(features, features, offset=-1).tolist()

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        products = torch.bmm(x, x.transpose(1, 2))
        return torch.cat([dense, products[:, self.i, self.j]], dim=1)


class TrainingStep(nn.Module):
    """forward(*inputs) -> the loss, and its gradient for every parameter: what an optimizer's step waits for.

    `model` may be compiled or optimized; the parameters are those of `of`.
    """

    def __init__(self, of: nn.Module, model: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.of = of
        self.run = [of if model is None else model]  # no submodule: it has the same parameters

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output = self.run[0](*inputs)
            loss = nn.functional.binary_cross_entropy_with_logits(output, torch.ones_like(output))
            return (loss.detach(), *torch.autograd.grad(loss, list(self.of.parameters())))


def ids(fields: int) -> Callable[[int, torch.Generator], tuple]:
    """Inputs int64 [B, fields]."""
    return lambda B, g: (torch.randint(0, ROWS, (B, fields), generator=g),)


def entries() -> list[Entry]:
    def sequences(B: int, g: torch.Generator) -> tuple:
        history = torch.randint(0, ROWS, (B, 100), generator=g)
        return torch.randint(0, ROWS, (B,), generator=g), history, torch.randint(1, 101, (B,), generator=g)

    def vectors(B: int, g: torch.Generator) -> tuple:
        return torch.randn(B, 16, generator=g), torch.randn(B, 26, 16, generator=g)

    return [
        Entry("DIN", DIN, sequences, (1, 256)),
        Entry("MMoE", MMoE, lambda B, g: (torch.randn(B, 128, generator=g),)),
        Entry("FiBiNET", FiBiNET, ids(26), (1, 256)),
        Entry("FFM", FFM, ids(26)),
        Entry("ONN", ONN, ids(20)),
        Entry("dot interaction", DotInteraction, vectors, (1, 16, 256, 1024, 4096)),
        Entry(
            "DLRM",
            lambda: _dlrm().build_model(),
            lambda B, g: _dlrm().example_inputs(B, g.initial_seed()),
            (1, 256, 1024),
        ),
    ]


def _dlrm() -> Any:
    """The example's model, which its scripts import by its bare name."""
    folder = str(Path(__file__).resolve().parents[1] / "examples" / "dlrm")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import model

    return model
