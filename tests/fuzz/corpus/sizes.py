"""Sizes that only look equal: those that data decide, one row, and numbers that coincide at the capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


def picked(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    rows = torch.arange(B) < round(fill * B)
    return torch.randn(B, 3), rows


@graph(picked, captured=(4, 4, 1.0), later=((4, 4, 0.25), (4, 4, 0.5), (5, 4, 0.0)))
class PickedRowsExpanded(nn.Module):
    """Picked rows expand to all rows where one or all of them are picked, and raise elsewhere."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].expand_as(x) + 0


@graph(picked, captured=(4, 4, 1.0), later=((4, 4, 0.25), (4, 4, 0.5)))
class PickedRowsAdded(nn.Module):
    """One picked row broadcasts; two raise."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.relu(x[rows] + x) * 2


def padded(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    longest = L if fill == 1 else 1
    return torch.randint(0, 9, (B, L)), torch.full((B,), longest)


@graph(padded, captured=(4, 5, 1.0), later=((4, 5, 0.1), (3, 1, 0.1)))
class LongestLength(nn.Module):
    """A mask as long as the longest row, over a padding that may be longer."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return (self.e(ids) * mask.unsqueeze(-1)).sum(1)


@graph(padded, captured=(4, 5, 1.0), later=((4, 5, 0.1), (3, 1, 0.1)))
class LongestLengthAsATensor(nn.Module):
    """The same, where arange takes the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(lengths.max())[None] < lengths[:, None]
        return (self.e(ids) * mask.unsqueeze(-1)).sum(1)


def rows(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 4),)


class Scrambled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x.transpose(0, 1).reshape(x.shape)) for expert in self.experts], 1)


class ScrambledExperts(Scrambled):
    """Experts over rows that a reshape has scrambled are no experts over the rows."""


SCRAMBLED_EXPERTS = graph(rows, captured=(1, 4), later=((4, 4), (3, 4)))(ScrambledExperts)
SCRAMBLED_EXPERTS_OF_A_SQUARE = graph(rows, captured=(4, 4), later=((8, 4), (3, 4)))(ScrambledExperts)


class LastRow(nn.Module):
    """The gate of the last row is that of every row only where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x[x.shape[0] - 1 :])


LAST_ROW_OF_ONE = graph(rows, captured=(1, 4), later=((4, 4), (3, 4)))(LastRow)
LAST_ROW_OF_MANY = graph(rows, captured=(4, 4), later=((1, 4), (3, 4)))(LastRow)


@graph(rows, captured=(4, 4), later=((3, 4), (8, 4)))
class SquareAtTheCapture(nn.Module):
    """Fits only where the batch is as large as the row."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.softmax(0)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 4, 4),), captured=(4, 4), later=((1, 4), (3, 4), (0, 4)))
class CubeAtTheCapture(nn.Module):
    """Batch, fields and dim are all 4 at the capture."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.permute(1, 2, 0).reshape(x.shape)) + x.permute(2, 0, 1).reshape(x.shape).sum(0)


class AsksForStrides(nn.Module):
    """A square matrix keeps the strides of its transpose, any other is copied."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x.T.reshape(x.shape) + 0
        return turned if turned.is_contiguous() else turned * 2


ASKS_FOR_STRIDES = graph(rows, captured=(3, 4), later=((4, 4), (5, 4)))(AsksForStrides)
ASKS_FOR_STRIDES_OF_A_SQUARE = graph(rows, captured=(4, 4), later=((3, 4), (5, 4)))(AsksForStrides)


def some_twice(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, L, 2), torch.rand(B) < fill


@graph(some_twice, captured=(2, 2, 1.0), later=((1, 1), (3, 5)))
class NormOfRepeatedRows(nn.Module):
    """An opaque norm of which the length and the channels are the same number at the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, twice: Tensor) -> Tensor:
        rows = x.repeat_interleave(twice.long() + 1, dim=0)
        return self.norm(rows.transpose(1, 2)).transpose(1, 2)


@graph(picked, captured=(4, 4, 1.0), later=((4, 4), (3, 4, 0.0)))
class PickedRowsTurnedInPlace(nn.Module):
    """Up to torch 2.12 a copy asks more about sizes than the edit in place does."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        picked = x[rows] * 2 + 1
        picked.copy_(picked.flip(0))
        return picked


@graph(
    lambda B, L, fill=0.6: (torch.randn(B, L, 4), torch.randint(0, 9, (B, 4)), torch.rand(B, L) < fill),
    captured=(4, 4),
    later=((3, 4), (8, 3)),
)
class FoursAtTheCapture(nn.Module):
    """The batch is what a reshape divides by, once other sizes of the inputs have been fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        first = x[..., 0] > 0
        fields = torch.cat([self.table(ids)[:, i] for i in range(4)], -1)
        return torch.where((mask & first).unsqueeze(-1), x, 0.0), fields, x.reshape(-1, 4)


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 1),), captured=(2, 2), later=((3, 5), (1, 4)), verify="first")
class TurnedPairSum(nn.Module):
    """The sum of the pairs as a row: its first size is 1, and its second one is the batch."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1))
        return torch.lerp(x, pairs.mT, 0.3)


@graph(lambda B, L, fill=0.6: (torch.randn(2, B),), captured=(1, 1), later=((3, 2), (5, 4)), grad=False)
class ItemsOfADiagonal(nn.Module):
    """How many items a tensor has is no product of sizes, and none of them has the axis that they were along."""

    def forward(self, x: Tensor) -> Tensor:
        item = x.diagonal().unbind(0)[0].unsqueeze(0)
        return item.view(item.shape)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3),), captured=(4, 4), later=((3, 2), (7, 1), (1, 1)))
class RowsOfTheSecondHalf(nn.Module):
    """A loop over rows of which a size says how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(row.new_zeros([2] * row.dim()) + row.sum() for row in x[x.shape[0] // 2 :])


@graph(lambda B, L, fill=0.6: (torch.randn(B, L),), captured=(2, 2), later=((1, 1), (3, 1)), grad=False)
class SqueezesADiagonal(nn.Module):
    """The axis goes where a size that is no symbol is 1, and narrow() raises."""

    def forward(self, x: Tensor) -> Tensor:
        diagonal = x.diagonal()
        return diagonal.expand(diagonal.shape).squeeze().narrow(0, 0, 1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 2), torch.randn(B, 2)), captured=(2, 2), later=((5, 2), (1, 2)))
class TurnedBehindAFusedSum(nn.Module):
    """The fused sum lies otherwise than eager's, whose square matrices, once turned, have the strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mixed = normed + (normed + y[:, None])
        return torch.cat([mixed, mixed.mT @ mixed])


@graph(lambda B, L, fill=0.6: (torch.randn(B, 4, 4),), captured=(5, 4), later=((4, 4), (3, 4)))
class LanesOfWhatMayBeAView(nn.Module):
    """The reshape is a view where there are as many rows as fields, and what is computed from it lies as it does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.transpose(0, 1).reshape(x.shape[0], 4, 4)
        stacked = torch.stack([torch.relu(turned[:, i] * 2) for i in range(4)], 1)
        return stacked, stacked.reshape(x.shape[0], 16)
