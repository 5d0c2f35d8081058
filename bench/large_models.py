"""Models with many or large tables, at sizes that a workstation can hold.

Letters: B batch, N ids of one bag, R rows and D dim of a table, L ids of each bag of one feature.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.dense_models import ROWS, mlp

MOST_ROWS = 100_000  # of one table: MLPerf's largest have 40 million
# MLPerf's DLRM-v2: https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
TABLES = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
          11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)  # fmt: skip


class DLRMv2(nn.Module):
    """MLPerf's DLRM-v2: 26 multi-hot tables and a cross network of low rank (Wang et al., arXiv:2008.13535).

    forward(dense [B, 13], ids: 26 of int64 [B, L]) -> [B, 1].
    """

    def __init__(self, dim: int = 128, rank: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(min(rows, MOST_ROWS), dim, mode="sum") for rows in TABLES)
        self.bottom = nn.Sequential(mlp(13, 512, 256, dim), nn.ReLU())
        width = dim * (1 + len(TABLES))
        self.narrow = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.top = mlp(width, 1024, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, ids: Sequence[Tensor]) -> Tensor:
        pooled = [table(x) for table, x in zip(self.tables, ids, strict=True)]
        first = x = torch.cat([self.bottom(dense), *pooled], dim=1)
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            x = first * wide(narrow(x)) + x
        return torch.sigmoid(self.top(x))


def dlrm_v2_inputs(B: int, g: torch.Generator) -> tuple:
    rows = (min(rows, MOST_ROWS) for rows in TABLES)
    return torch.rand(B, 13, generator=g), [
        torch.randint(0, R, (B, L), generator=g) for R, L in zip(rows, HOT, strict=True)
    ]


class MixedColumns(nn.Module):
    """1000 features that differ as RecFlex's do (Pan et al., SC 2024): half one-hot, dims from 4 to 128, bags of
    all lengths; and a small MLP.

    forward(ids: F of int64 [B], bags: F of (values int64 [N], offsets int64 [B])) -> [B, 1].
    """

    LONGEST = (2, 10, 40)

    def __init__(self, features: int = 1000, rows: int = ROWS) -> None:
        super().__init__()
        chosen = random.Random(0)
        dims = [chosen.choice((4, 8, 16, 32, 64, 128)) for _ in range(features)]
        half = features // 2
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for dim in dims[:half])
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode=("sum", "mean")[i % 2]) for i, dim in enumerate(dims[half:])
        )
        self.top = mlp(sum(dims), 256, 1)

    def forward(self, ids: Sequence[Tensor], bags: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        rows = [table(x) for table, x in zip(self.tables, ids, strict=True)]
        pooled = [bag(*x) for bag, x in zip(self.bags, bags, strict=True)]
        return torch.sigmoid(self.top(torch.cat(rows + pooled, dim=1)))

    @classmethod
    def inputs(cls, B: int, g: torch.Generator, features: int = 1000, rows: int = ROWS) -> tuple:
        half = features // 2
        bags = []
        for i in range(features - half):
            lengths = torch.randint(0, cls.LONGEST[i % len(cls.LONGEST)] + 1, (B,), generator=g)
            values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
            bags.append((values, lengths.cumsum(0) - lengths))
        return [torch.randint(0, rows, (B,), generator=g) for _ in range(half)], bags


class DeepFM(nn.Module):
    """A factorization machine beside an MLP (Guo et al., arXiv:1703.04247). forward(ids int64 [B, 26]) -> [B, 1]."""

    def __init__(self, fields: int = 26, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(fields))
        self.linear = nn.ModuleList(nn.Embedding(ROWS, 1) for _ in range(fields))
        self.deep = mlp(fields * dim, 400, 400, 1)
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=0.1)  # as trained ones are: else the squares cancel, and rounding is all

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        first = torch.cat([table(ids[:, i]) for i, table in enumerate(self.linear)], dim=1).sum(1, keepdim=True)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(first + pairs + self.deep(x.flatten(1)))


class TorchRecDLRM:
    """TorchRec's own DLRM over an EmbeddingBagCollection: 26 features of 0 to 9 ids in a KeyedJaggedTensor."""

    KEYS = tuple(f"f{i}" for i in range(26))

    @classmethod
    def model(cls, dim: int = 64) -> nn.Module:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.models.dlrm import DLRM

        tables = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[key])
            for key in cls.KEYS
        ]
        return DLRM(EmbeddingBagCollection(tables=tables), 13, [512, 256, dim], [512, 256, 1])

    @classmethod
    def inputs(cls, B: int, g: torch.Generator) -> tuple:
        lengths = torch.randint(0, 10, (len(cls.KEYS) * B,), generator=g)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        return torch.rand(B, 13, generator=g), cls._jagged(values, lengths)

    @classmethod
    def fresh(cls, args: tuple) -> tuple:
        """The same arguments without the offsets that an earlier call has kept in them."""
        dense, jagged = args
        return dense, cls._jagged(jagged.values(), jagged.lengths())

    @classmethod
    def _jagged(cls, values: Tensor, lengths: Tensor) -> Any:
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor(list(cls.KEYS), values, lengths=lengths)
