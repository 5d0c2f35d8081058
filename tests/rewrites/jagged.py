"""Models of features that lie back to back, as TorchRec has them, without TorchRec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, ROWS = 3, 30


def jagged(batch: int, dtype: torch.dtype = torch.int64, longest: int = 4) -> tuple[Tensor, Tensor]:
    """ids [N] and lengths [FEATURES * batch]."""
    lengths = torch.randint(0, longest, (FEATURES * batch,), dtype=dtype)
    return torch.randint(0, ROWS, (int(lengths.sum()),), dtype=dtype), lengths


class Collection(nn.Module):
    """Split by the sums of lengths, with offsets of all features at once."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, dim, mode=mode, include_last_offset=True) for dim in (8, 3, 16))

    def pieces(self, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        rows = lengths.view(FEATURES, -1) if lengths.dim() == 1 else lengths
        offsets = torch.cat([rows.new_zeros(FEATURES, 1), rows.cumsum(1).to(rows.dtype)], 1)
        return list(zip(ids.split(rows.sum(1).tolist()), offsets.unbind(0), strict=True))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        pieces = self.pieces(ids, lengths)
        return torch.cat([bag(*piece) for bag, piece in zip(self.bags, pieces, strict=True)], 1)


class Sliced(Collection):
    """Each feature by its own slice, between places that are added up in Python."""

    def pieces(self, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        batch, at, found = lengths.shape[0] // FEATURES, 0, []
        for feature, count in enumerate(lengths.view(FEATURES, -1).sum(1).tolist()):
            mine = lengths[feature * batch : (feature + 1) * batch]
            found.append((ids[at : at + count], F.pad(mine.cumsum(0), (1, 0))))
            at += count
        return found


class ByOffsets(Collection):
    """Given offsets instead of lengths."""

    def pieces(self, ids: Tensor, offsets: Tensor) -> list[tuple[Tensor, Tensor]]:
        return super().pieces(ids, offsets.diff())


class Hashed(Collection):
    """Ids that are changed before and after they are cut."""

    def pieces(self, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [((ids * 7 + 1).remainder(ROWS), offsets) for ids, offsets in super().pieces(ids + 3, lengths)]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(ROWS, 8) for _ in range(FEATURES))

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        sizes = lengths.view(FEATURES, -1).sum(1).tolist()
        offsets = F.pad(lengths.view(FEATURES, -1).cumsum(1), (1, 0)).unbind(0)
        parts = zip(self.tables, ids.split(sizes), offsets, weights.split(sizes), strict=True)
        return torch.cat(
            [
                F.embedding_bag(i, table, o, mode="sum", per_sample_weights=w, include_last_offset=True)
                for table, i, o, w in parts
            ],
            1,
        )


class Sequences(nn.Module):
    """Rows of every id, feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 8, padding_idx=2) for _ in range(FEATURES))

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        sizes = lengths.view(FEATURES, -1).sum(1).tolist()
        return [table(part) for table, part in zip(self.tables, ids.split(sizes), strict=True)]


class OtherOrder(Collection):
    """Offsets of another feature than the ids: as many bags, and maybe too few ids for them."""

    def pieces(self, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        ids_of, offsets = zip(*super().pieces(ids, lengths), strict=True)
        return list(zip(ids_of, offsets[::-1], strict=True))


class OfRandomRows(Collection):
    """For the catalogue, which makes inputs of floats: one id a bag."""

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :1].abs() * 1000).long().remainder(ROWS).repeat(FEATURES, 1).flatten()
        return super().forward(ids, torch.ones_like(ids))


class OfOneFeature(OfRandomRows):
    """Nothing depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 1000).long().remainder(ROWS)
        return self.bags[0](ids, torch.arange(x.shape[0] + 1))
