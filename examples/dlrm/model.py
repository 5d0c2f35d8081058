"""A classic DLRM in plain PyTorch (Naumov et al., arXiv:1906.00091): nothing here knows of fxopt.

`build_model()` and `example_inputs(batch_size)` are the convention of `python -m fxopt report FILE`.
Letters: B batch, F = 27 vectors that interact (26 features and the dense one), D dim of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

DENSE_FEATURES = 13
SPARSE_FEATURES = 26
DIM = 16
# Rows of each table: few for the features with few values, as in the Criteo data.
TABLE_ROWS = tuple(100_000 if feature % 8 == 0 else 10_000 for feature in range(SPARSE_FEATURES))


def mlp(sizes: Sequence[int], last_relu: bool) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them, and after the last one if asked."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class DLRM(nn.Module):
    """Bottom MLP on the dense features, a table for each sparse one, their dot products, top MLP.

    Args:
        table_rows: rows of each table.
        dim: width D of the embeddings and of the bottom MLP's output.
        bottom, top: hidden sizes of the two MLPs.
    """

    pairs: Tensor

    def __init__(
        self,
        table_rows: Sequence[int] = TABLE_ROWS,
        dim: int = DIM,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        vectors = len(table_rows) + 1
        self.bottom = mlp((DENSE_FEATURES, *bottom, dim), last_relu=True)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for rows in table_rows)
        self.top = mlp((dim + vectors * (vectors - 1) // 2, *top, 1), last_relu=False)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        for rows, table in zip(table_rows, self.tables, strict=True):
            nn.init.uniform_(table.get_parameter("weight"), -(rows**-0.5), rows**-0.5)

    def interact(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        """Dense [B, D] and the features' [B, D] each to [B, D + F(F-1)/2]: dense beside each pair's dot product."""
        vectors = torch.stack([dense, *sparse], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense [B, 13] float32 and sparse ids [B, 26] int64 to logits [B] float32."""
        x = self.bottom(dense)
        bags = [table(sparse[:, feature : feature + 1]) for feature, table in enumerate(self.tables)]
        return self.top(self.interact(x, bags)).squeeze(1)


def build_model() -> DLRM:
    """The model at its default sizes (620,000 rows of 16), seeded, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DLRM().eval()


def example_inputs(batch_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random (dense, sparse) of `batch_size` rows, the positional arguments of the model."""
    generator = torch.Generator().manual_seed(seed + batch_size)
    dense = torch.rand(batch_size, DENSE_FEATURES, generator=generator)
    ids = [torch.randint(rows, (batch_size,), generator=generator) for rows in TABLE_ROWS]
    return dense, torch.stack(ids, dim=1)
