"""The DLRM of TorchRec for Criteo data: its tables in one EmbeddingBagCollection, its batches as KeyedJaggedTensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

from criteo import CATEGORIES, INTEGERS, Part, read_batches
from model import DIM, TABLE_ROWS

FEATURES = [f"C{number}" for number in range(1, CATEGORIES + 1)]


def build(device: torch.device | None = None) -> nn.Module:
    """DLRMTrain on a torchrec Batch: the loss, and (loss, logits, labels) detached."""
    tables = [
        EmbeddingBagConfig(name=f"table_{feature}", embedding_dim=DIM, num_embeddings=rows, feature_names=[feature])
        for feature, rows in zip(FEATURES, TABLE_ROWS, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=device)
    return DLRMTrain(DLRM(collection, INTEGERS, [512, 256, DIM], [512, 512, 256, 1], dense_device=device))


def batches(path: str | Path, batch_size: int, part: Part, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """One rank's share of each batch: `batch_size` rows, fewer of the file's last ones, as many steps on every rank."""
    for batch in read_batches(path, batch_size * ranks, TABLE_ROWS, part):
        if len(batch.labels) >= ranks:
            yield _batch(batch.dense[rank::ranks], batch.sparse[rank::ranks], batch.labels[rank::ranks])


def _batch(dense: Tensor, ids: Tensor, labels: Tensor) -> Batch:
    """dense [B, 13] float32, ids [B, 26] int64 (one of each table), labels [B]."""
    lengths = torch.ones(ids.numel(), dtype=torch.int32)
    return Batch(dense, KeyedJaggedTensor(FEATURES, ids.t().reshape(-1), lengths=lengths), labels)
