"""Features whose ids lie behind each other, with a length for each of their bags: TorchRec's KeyedJaggedTensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyedBags(nn.Module):
    """As an EmbeddingBagCollection under an MLP. mean: of all ids, which the rows of the result contain too."""

    def __init__(self, tables: int = 5, rows: int = 300, dim: int = 8, mean: bool = False) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(rows + k, dim, mode="sum", include_last_offset=True) for k in range(tables))
        self.tables, self.mean = nn.ModuleList(bags), mean
        self.over = nn.Sequential(nn.Linear(dim * tables + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Scores [B, 1] of dense [B, 3], ids [N] and lengths [T * B]."""
        by_feature = lengths.view(len(self.tables), -1)
        parts = values.split(by_feature.sum(1).tolist())
        features = zip(self.tables, parts, by_feature, strict=True)
        pooled = [table(ids, F.pad(own.cumsum(0), (1, 0))) for table, ids, own in features]
        scores = self.over(torch.cat([dense, *pooled], 1))
        return scores + values.float().mean() if self.mean else scores


def keyed_inputs(batch: int, tables: int = 5, most: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(0, most + 1, (tables * batch,))
    return torch.randn(batch, 3), torch.randint(0, 300, (int(lengths.sum()),)), lengths
