"""What random dense graphs have found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


@graph(lambda B, L, fill=0.6: (torch.randint(0, 2, (B, 2)),), grad=True)
class MeanOfAComparison(nn.Module):
    """What has no gradient in eager asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.e(ids) > 0).float().mean(2)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3, 2), torch.randn(B, 2)), captured=(2, 2), later=((0, 2),), grad=True)
class TowersTimesRows(nn.Module):
    """A product with the rows of the batch as columns, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.stack([torch.relu(t(x[:, i])) for i, t in enumerate(self.towers)], 1)
        return torch.matmul(found, y.transpose(-1, -2))


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 2),))
class FilledBehindATranspose(nn.Module):
    """masked_fill makes contiguous memory of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return torch.erf(found.masked_fill(found > 0, 0))


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3, 2),), grad=True)
class OneTowerOfThree(nn.Module):
    """The towers that nobody reads have gradients of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([t(x[:, i]) for i, t in enumerate(self.towers)], 1)[:, 2]


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3, 2),), grad=True)
class OnePieceOfAStack(nn.Module):
    """A stack that is taken apart at once keeps its other towers for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([t(x[:, i]) for i, t in enumerate(self.towers)], 1).unbind(1)[1] * 2


def fields(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, 2).abs() * (1 if fill == 1 else -1), torch.randn(B, 1, 1)


@graph(fields, captured=(1, 4, 0.0), later=((4, 4, 1.0), (2, 4, 1.0)))
class PickedByTheirSum(nn.Module):
    """Rows that data pick, all or none, times one row."""

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        picked = y[y.sum(1) > 0] * y[:1]
        return (picked * x).sum(-1, keepdim=True)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2),), captured=(2, 2), later=((3, 2), (1, 2)))
class ProductWithTheLastRow(nn.Module):
    """The last row by its number; the slice's size is no row count."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        last = x[x.shape[0] - 1 :]
        return torch.addcmul(x, x, last), torch.minimum(x, last), x - x[-1:], x * x[:1]


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 3),), captured=(2, 4), later=((0, 4), (1, 4)), grad=True)
class NothingOfALayer(nn.Module):
    """Layers of width 0 and their gradients, of rows and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(3, 0)
        self.wide = nn.Linear(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.relu(self.narrow(x))) * torch.sigmoid(x)


@graph(lambda B, L, fill=0.6: (torch.randint(0, 9, (B, 2)),), captured=(2, 4), later=((0, 4), (1, 4)), grad=True)
class TablesOfNothing(nn.Module):
    """A table of width 0 beside another one, pooled and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(9, 0)
        self.w = nn.Embedding(9, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([self.e(ids), self.w(ids)], -1).relu(), self.e(ids).sum(1), self.e(ids)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3, 2),), later=((3, 4), (1, 4), (0, 4)))
class FilledBehindAnything(nn.Module):
    """What masked_fill gives is contiguous, whatever memory it is given and whoever writes over that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mask = x > 0
        return (
            torch.sigmoid(turned * 2).masked_fill(mask, 0),
            torch.exp(turned).masked_fill(mask, torch.tensor(1.0)),
            (turned + 1).masked_fill(mask[:, :1], 2).tanh(),
        )


@graph(lambda B, L, fill=0.6: (torch.randn(B, 5),), captured=(6, 6), training=True)
class AroundAnOpaqueNorm(nn.Module):
    """What runs row by row stands before an opaque module and behind it: it is no one call."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, middle, right = (tower(x.flip(0)) * 2 for tower in self.towers)
        gate = torch.sigmoid(self.norm(middle))
        mixed = gate * middle + (1 - gate) * middle
        return left, right, torch.relu(mixed + mixed)


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 2), torch.randn(B, 1, L, 2)), captured=(1, 1))
class OneHeadOfEach(nn.Module):
    """Sizes that a split makes equal to a number are that number."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        queries = torch.stack(self.queries(x).split(2, -1), 1)
        keys = torch.stack(self.keys(x).split(2, -1), 1)
        return torch.softmax(queries @ keys.mT * 0.5, -1) @ values


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3, 4),), captured=(2, 2), later=((5, 4), (1, 4), (0, 4)))
class RowsOfAnInputSideBySide(nn.Module):
    """What towers copy, multiply and read of their input goes beyond the end of one of its inner rows."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.wide = nn.ModuleList([nn.Linear(8, 2) for _ in range(2)])
        self.each = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        towers = [tower(x[:, i]) for i, tower in enumerate(self.towers)]
        beside = torch.cat([towers[0], x[:, 0], x[:, 1]], 1)
        multiplied = torch.cat([x[:, 1], x[:, 2], towers[1]], 1) * torch.cat([towers[2], x[:, 0], x[:, 1]], 1)
        return torch.cat([self.each(x), x, x], 1), sum(towers), multiplied, *(net(beside[:, 4:]) for net in self.wide)


@graph(lambda B, L, fill=0.6: (torch.randint(0, 9, (B, 3)), torch.randn(B, 4)), captured=(4, 4), grad=True)
class OnlyCompared(nn.Module):
    """A table whose rows reach the result through comparisons alone has no gradient, whichever operator reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(9, 4) for _ in range(3)])
        self.mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        pairs, dots, largest = (table(ids) for table in self.tables)
        summed = 0.5 * (pairs.sum(1) ** 2 - (pairs**2).sum(1))
        i, j = torch.triu_indices(3, 3, 1)
        inner = self.mlp((dots @ dots.transpose(1, 2))[:, i, j])
        top = largest.flatten(1).topk(4, 1)[0]
        return tuple((self.norm(x) / 3).masked_fill(found * 2 > 0, 0.0) for found in (summed, inner, top))


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 4), torch.randn(B, L)), captured=(4, 1), later=((3, 1), (4, 4)))
class ProductOfAScrambledTensor(nn.Module):
    """A product over an axis of length 1 has strides of its own, however the elementwise one's factors lie."""

    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        scrambled = x.transpose(0, 2).contiguous().view(x.shape)
        return torch.einsum("bl,bld->bd", weights, scrambled), (weights.unsqueeze(1) @ scrambled).squeeze(1)


@graph(lambda B, L, fill=0.6: (torch.randn(2, 2, B).permute(2, 1, 0),), captured=(2, 2), later=((3, 4), (1, 4)))
class FieldsOfATransposedTensor(nn.Module):
    """What advanced indexing gives lies in memory as its argument does."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x[:, [0]] * x[:, [1]])[:, :, 0], x[:, [0, 1, 0]], x[:, [0, 1], [1, 0]]


@graph(lambda B, L, fill=0.6: (torch.randn(B, 6, 4), torch.randint(0, 2, (B, 6))), later=((7, 4), (3, 4)), many=True)
class ReadsOfOtherRows(nn.Module):
    """Norms over the batch, sums over all dims and the last row are none of a chunk's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(6)])

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.layer(x)) * 2
        normed = torch.relu(y * torch.rsqrt(y.pow(2).mean(0, keepdim=True) + 1e-3)) + 1
        shares = y / (y.abs().sum((1, 0, 2), keepdim=True) + 1)
        lanes = [torch.tanh(part * scale) for part, scale in zip(x.unbind(1), self.scales, strict=True)]
        whole = torch.stack([lane / (lane.sum(dim=[]) + 9.0) for lane in lanes], 1)
        last = x * torch.relu(x.amax(-1) @ torch.ones(6, 6))[..., None] * x[x.shape[0] - 1 :]
        return normed, shares, whole, torch.where((ids != 0).unsqueeze(-1), last, 0.0)


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 2),), later=((3, 2),), many=True)
class RootOfTheNumberOfRows(nn.Module):
    """A chunk has fewer rows: what is computed from their number is not the same for it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.nn.functional.hardsigmoid(torch.cat([x, x, x], 1).reshape(-1))
        return flat / flat.shape[-1] ** 0.5


@graph(lambda B, L, fill=0.6: (torch.randn(B, 5),), captured=(2, 2), later=((3, 2), (600, 2)))
class LargestOfAFusedSum(nn.Module):
    """The threshold and what is compared with it are one value: computed twice, they differ by a rounding."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        mixed = gate * x.select(0, 0).unsqueeze(0) + (1 - gate) * x
        return torch.softmax(mixed.masked_fill(mixed < mixed.topk(1, 1).values, -1e4), -1)
