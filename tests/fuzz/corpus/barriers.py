"""Reads that may not move across an edit, whatever alias made it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


def rows(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 4),)


def ids(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randint(0, 3, (B,)), torch.randint(0, 3, (B,))


class MonotoneExperts(nn.Module):
    """Each weight is clamped just before its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            layer.weight.data.clamp_(min=0)
            found.append(layer(x))
        return torch.stack(found, 1)


MONOTONE_EXPERTS = graph(rows)(MonotoneExperts)
MONOTONE_EXPERTS_VERIFIED = graph(rows, verify="first", example=False)(MonotoneExperts)


class PaddingRows(nn.Module):
    """The first row of each table is zeroed just before its lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(3, 4) for _ in range(2)])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found = []
        for table, own in zip(self.tables, (a, b), strict=True):
            with torch.no_grad():
                table.weight[0].zero_()
            found.append(table(own))
        return torch.cat(found, 1)


PADDING_ROWS = graph(ids)(PaddingRows)
PADDING_ROWS_VERIFIED = graph(ids, verify="first", example=False)(PaddingRows)


class ReadBeforeAndBehind(nn.Module):
    """One table, looked up before and behind an edit through an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(3, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        first = self.e(a)
        self.e.weight.detach().mul_(0.5)
        return torch.cat([first, self.e(b)], 1)


READ_BEFORE_AND_BEHIND = graph(ids)(ReadBeforeAndBehind)


@graph(ids)
class MaxNorm(nn.Module):
    """Lookups that edit their table."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(3, 4, max_norm=0.5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([self.e(a), self.e.weight[b], self.e(b)], 1)


@graph(ids, captured=(5, 4))
class EditedOneHot(nn.Module):
    """A product with a one-hot matrix is a lookup only where nothing has edited the ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(3, 4) for _ in range(2)])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        hot = nn.functional.one_hot(a, 3).float()
        hot.detach().mul_(0.5)
        return torch.cat([hot @ self.tables[0].weight, self.tables[1](b)], 1)


class Counted(nn.Module):
    """Two groups that one call could compute, were it not for a divisor that the model counts up in between."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.gate, self.tower = nn.Linear(4, 2), nn.Linear(4, 4)
        self.register_buffer("steps", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (experts * torch.softmax(self.gate(x), -1).unsqueeze(-1)).sum(1)
        self.steps[0] += 1
        return torch.sigmoid(self.tower(mixed.roll(1, 0))), mixed / (self.steps + 1)


COUNTED = graph(rows, grad=True, many=True)(Counted)
COUNTED_WITHOUT_GRADIENTS = graph(rows)(Counted)


@graph(ids)
class CountedBetweenColumns(nn.Module):
    """The weights of the second bags are those of the buffer that was edited behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(3, 4), nn.EmbeddingBag(3, 4, mode="sum")
        self.register_buffer("logits", torch.ones(1))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(a)
        self.logits[0] += 1
        weights = torch.exp(self.logits).repeat(b.shape[0]).unsqueeze(1)
        return first, self.second(b.unsqueeze(1), per_sample_weights=weights)
