"""Models E and F of RECom (Pan et al., "RECom: A Compiler Approach to Accelerating Recommendation Model
Inference with Massive Embedding Columns", ASPLOS 2023), in plain PyTorch and scalable.

Letters: B batch, F features of one kind, N ids of one multi-hot feature, R rows and D dim of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

DENSE = 32  # width of the dense features, and of the linear layer over them
BOUNDARIES = 100
LARGEST_BAG = 10
INT64 = torch.iinfo(torch.int64)

Bags = Sequence[tuple[Tensor, Tensor]]
Feature = Tensor | Sequence[Tensor]  # one packed [B, F] or F of [B]
Inputs = tuple[Tensor, Feature, Feature, Bags]


@dataclass(frozen=True)
class Mix:
    """How many columns of each kind a model has, and the widths of its top MLP.

    bucketize: 100 boundaries, a table of 101 x 8.   int_hash: id % 100, a table of 100 x 8.
    hashed: id % 10,000, a table of 10,000 x 8.      bags: multi-hot of 0-10 ids, a table of 10,000 x 8.
    large_bags: multi-hot of 0-10 ids, a table of 1,000,000 x 32.
    """

    bucketize: int
    int_hash: int
    hashed: int
    bags: int
    large_bags: int
    top: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.bucketize + self.int_hash + self.hashed + self.bags + self.large_bags

    @property
    def width(self) -> int:
        """Of the concat of all columns and the dense features."""
        narrow = self.bucketize + self.int_hash + self.hashed
        return DENSE + 8 * narrow + sum(D for _, D in self.bag_tables)

    @property
    def bag_tables(self) -> list[tuple[int, int]]:
        """(R, D) of each multi-hot column."""
        return [(10_000, 8)] * self.bags + [(1_000_000, 32)] * self.large_bags

    def scaled(self, columns: int) -> Mix:
        """The same proportions in `columns` columns, at least one of each kind."""
        few = {
            kind: max(1, round(getattr(self, kind) * columns / self.columns))
            for kind in ("int_hash", "hashed", "bags", "large_bags")
        }
        bucketize = columns - sum(few.values())
        if bucketize < 1:
            raise ValueError(f"columns: expected at least 5, one of each kind, found {columns}")
        return replace(self, bucketize=bucketize, **few)


E = Mix(880, 50, 50, 15, 5, top=(1024, 1024, 128))
F = Mix(1000, 90, 100, 7, 3, top=(2048, 1024, 1024, 512))


class Bucketize(nn.Module):
    """A float column: bucketize by BOUNDARIES sorted values, then look up. [B] -> [B, D]."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.boundaries: Tensor
        self.register_buffer("boundaries", torch.rand(BOUNDARIES).sort().values)
        self.table = nn.Embedding(BOUNDARIES + 1, dim)

    def ids(self, values: Tensor) -> Tensor:
        return torch.bucketize(values, self.boundaries)


class Hash(nn.Module):
    """An id column: the remainder by the number of rows, then look up. int64 [B] -> [B, D]."""

    def __init__(self, rows: int, dim: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim)

    def ids(self, ids: Tensor) -> Tensor:
        return torch.remainder(ids, self.table.num_embeddings)


def guarded(ids: Tensor, rows: int) -> Tensor:
    """ids [N] in [0, rows) behind the checks that production graphs carry, none of which changes one: [N, 1]."""
    ids = ids.clamp(0, rows - 1)
    ids = torch.where(ids < 0, torch.zeros_like(ids), ids)
    return (ids % rows % rows).reshape(-1, 1)


class Columns(nn.Module):
    """Every embedding column and the dense features, concatenated. guarded: with redundant checks around every column.

    forward(dense, floats, ids, bags) -> [B, width]
        dense: float [B, DENSE].
        floats: a list of float [B], one per bucketize column; packed: one float [B, F].
        ids: a list of int64 [B], any value, one per hash column (int_hash first); packed: one int64 [B, F].
        bags: a list of (values int64 [N], offsets int64 [B]), values in [0, R).
    """

    guarded = False

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.dense = nn.Linear(DENSE, DENSE)
        self.floats = nn.ModuleList(Bucketize() for _ in range(mix.bucketize))
        self.ids = nn.ModuleList([Hash(100) for _ in range(mix.int_hash)] + [Hash(10_000) for _ in range(mix.hashed)])
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(R, D, mode=("sum", "mean")[i % 2]) for i, (R, D) in enumerate(mix.bag_tables)
        )

    def forward(self, dense: Tensor, floats: Feature, ids: Feature, bags: Bags) -> Tensor:
        floats, ids = _per_column(floats), _per_column(ids)
        parts = [torch.relu(self.dense(dense))]
        parts += [self._rows(column, x) for column, x in zip(self.floats, floats, strict=True)]
        parts += [self._rows(column, x) for column, x in zip(self.ids, ids, strict=True)]
        parts += [self._pooled(bag, *bagged) for bag, bagged in zip(self.bags, bags, strict=True)]
        return torch.cat(parts, dim=1).flatten(1) if self.guarded else torch.cat(parts, dim=1)

    def _rows(self, column: Any, feature: Tensor) -> Tensor:
        ids, table = column.ids(feature), column.table
        return table(guarded(ids, table.num_embeddings)).squeeze(1) if self.guarded else table(ids)

    def _pooled(self, bag: Any, values: Tensor, offsets: Tensor) -> Tensor:
        return bag(guarded(values, bag.num_embeddings).squeeze(1) if self.guarded else values, offsets)


class ManyColumns(nn.Module):
    """Columns and a top MLP (Linear and ReLU, a sigmoid at the end); same inputs, output [B, 1].

    With `columns_only` it stops at the concat.
    """

    def __init__(self, mix: Mix, columns_only: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.mix = mix
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.columns = Columns(mix)
            self.top: nn.Module = nn.Identity() if columns_only else _mlp(mix.width, mix.top)
        self.eval()

    def forward(self, dense: Tensor, floats: Feature, ids: Feature, bags: Bags) -> Tensor:
        return self.top(self.columns(dense, floats, ids, bags))

    def with_guards(self) -> ManyColumns:
        """The same parameters, with redundant checks around every column."""
        twin, columns = copy(self), copy(self.columns)
        columns.guarded = True
        twin._modules = {**self._modules, "columns": columns}
        return twin


def make_inputs(mix: Mix, batch_size: int, packed: bool = False, seed: int = 0) -> Inputs:
    """Random arguments of `ManyColumns.forward`: every bucket, negative and huge ids, empty bags."""
    g = torch.Generator().manual_seed(seed * 7919 + batch_size)
    dense = torch.randn(batch_size, DENSE, generator=g)
    # Also below and above all boundaries.
    floats = torch.rand(batch_size, mix.bucketize, generator=g) * 1.1 - 0.05
    ids = torch.randint(INT64.min, INT64.max, (batch_size, mix.int_hash + mix.hashed), generator=g)
    bags = [_bag(batch_size, rows, g) for rows, _ in mix.bag_tables]
    if packed:
        return dense, floats, ids, bags
    return dense, [x.contiguous() for x in floats.unbind(1)], [x.contiguous() for x in ids.unbind(1)], bags


def ModelE(columns: int = 1000, columns_only: bool = False) -> ManyColumns:
    return ManyColumns(E.scaled(columns), columns_only)


def ModelF(columns: int = 1200, columns_only: bool = False) -> ManyColumns:
    return ManyColumns(F.scaled(columns), columns_only)


def _per_column(feature: Feature) -> Sequence[Tensor]:
    return [feature[:, i] for i in range(feature.shape[1])] if isinstance(feature, Tensor) else feature


def _mlp(width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Weights that keep the scale of the activations, so that outputs differ from row to row."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip((width, *hidden), (*hidden, 1), strict=True):
        linear = nn.Linear(n_in, n_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu" if n_out > 1 else "linear")
        layers += [linear, nn.ReLU() if n_out > 1 else nn.Sigmoid()]
    return nn.Sequential(*layers)


def _bag(B: int, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(values, offsets) of B bags of 0 to LARGEST_BAG ids; of two and more bags the last is empty."""
    lengths = torch.randint(0, LARGEST_BAG + 1, (B,), generator=g)
    if B > 1:
        lengths[-1] = 0
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    return values, torch.cumsum(lengths, 0) - lengths
