"""Sizes that depend on data, sizes that coincide, and calls of one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attacks.attack import Attack


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape)


def picks(size: int, *chosen: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(chosen)] = True
    return mask


class ExpandPicked(nn.Module):
    def forward(self, x, mask):
        return x[mask].expand_as(x) + 0


class AddPicked(nn.Module):
    def forward(self, x, mask):
        return torch.relu(x + x[mask]) * 2


class PickedTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, mask):
        return self.tower(x[mask]) * self.tower(x)


class PickedCat(nn.Module):
    def forward(self, x, mask):
        return torch.cat([x, x[mask]], 1)


class PickedSquare(nn.Module):
    def forward(self, x, mask):
        y = x[mask]
        return (y @ y.T).softmax(-1) @ y


class PaddedToLongest(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(20, 5)

    def forward(self, ids, lengths):
        mask = torch.arange(lengths.max())[None] < lengths[:, None]
        return (self.e(ids) * mask[:, :, None]).sum(1)


class CutToLongest(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(20, 5)

    def forward(self, ids, lengths):
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        return (self.e(ids[:, :longest]) * mask.unsqueeze(-1)).sum(1) / lengths[:, None]


class Nonzero(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(rows(4))

    def forward(self, x):
        at = (x > 0).nonzero()
        return x[at[:, 0], at[:, 1]] * 2, (x[at[:, 0]] * self.w).sum(0)


class Repeated(nn.Module):
    def forward(self, x, counts, y):
        return torch.repeat_interleave(x, counts, 0) * y


class Unique(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(30, 4)

    def forward(self, ids, x):
        distinct, back = ids.unique(return_inverse=True)
        return self.e(distinct)[back] + x, self.e(distinct) * x


class SelectedMean(nn.Module):
    def forward(self, x, mask):
        return torch.masked_select(x, mask).view(-1, x.shape[1]).mean(0)


class ViewAsPicked(nn.Module):
    def forward(self, x, mask, y):
        return y.view(x[mask].shape[0], -1) * 3


class SplitByLengths(nn.Module):
    def forward(self, x, lengths):
        parts = x.split(lengths.tolist())
        return torch.stack([part.sum(0) for part in parts])


class WhereOfPicked(nn.Module):
    def forward(self, x, mask):
        return torch.where(x[mask] > 0, x[mask], x)


def masked(model: type[nn.Module], width: int = 3) -> Attack:
    return Attack(
        model,
        [
            lambda: (rows(4, width), picks(4, 0, 1, 2, 3)),
            lambda: (rows(4, width), picks(4, 2)),
            lambda: (rows(4, width), picks(4, 1, 3)),
            lambda: (rows(4, width), picks(4)),
            lambda: (rows(7, width), picks(7, *range(7))),
            lambda: (rows(1, width), picks(1, 0)),
        ],
    )


def lengths(*values: int) -> Tensor:
    return torch.tensor(values)


def ids(*shape: int, below: int = 20) -> Tensor:
    return torch.randint(1, below, shape)


DATA_DEPENDENT = {
    "expand_picked": masked(ExpandPicked),
    "add_picked": masked(AddPicked),
    "picked_tower": masked(PickedTower, 6),
    "picked_cat": masked(PickedCat),
    "picked_square": masked(PickedSquare),
    "where_of_picked": masked(WhereOfPicked),
    "padded_to_longest": Attack(
        PaddedToLongest,
        [
            lambda: (ids(4, 6), lengths(6, 2, 1, 3)),
            lambda: (ids(4, 6), lengths(1, 1, 1, 1)),
            lambda: (ids(4, 6), lengths(2, 4, 1, 3)),
            lambda: (ids(3, 2), lengths(2, 1, 2)),
            lambda: (ids(1, 1), lengths(1)),
        ],
    ),
    "cut_to_longest": Attack(
        CutToLongest,
        [
            lambda: (ids(4, 6), lengths(6, 2, 1, 3)),
            lambda: (ids(4, 6), lengths(1, 1, 1, 1)),
            lambda: (ids(4, 6), lengths(2, 4, 1, 3)),
            lambda: (ids(1, 3), lengths(1)),
        ],
    ),
    "nonzero": Attack(Nonzero, [lambda: (rows(5, 4),), lambda: (-rows(5, 4).abs(),), lambda: (rows(1, 4),)]),
    "repeated": Attack(
        Repeated,
        [
            lambda: (rows(3, 2), lengths(2, 1, 2), rows(5, 2)),
            lambda: (rows(3, 2), lengths(1, 0, 0), rows(5, 2)),
            lambda: (rows(3, 2), lengths(2, 2, 2), rows(5, 2)),
            lambda: (rows(3, 2), lengths(2, 2, 2), rows(1, 2)),
        ],
    ),
    "unique": Attack(
        Unique,
        [
            lambda: (lengths(3, 9, 1), rows(3, 4)),
            lambda: (lengths(3, 3, 3), rows(3, 4)),
            lambda: (lengths(3, 9, 3), rows(3, 4)),
        ],
    ),
    "selected_mean": Attack(
        SelectedMean,
        [
            lambda: (rows(4, 3), picks(4, 0, 1)[:, None].expand(4, 3)),
            lambda: (rows(4, 3), picks(4, 3)[:, None].expand(4, 3)),
            lambda: (rows(4, 3), rows(4, 3) > 0),
        ],
    ),
    "view_as_picked": Attack(
        ViewAsPicked,
        [
            lambda: (rows(4, 3), picks(4, 0, 1), rows(4, 3)),
            lambda: (rows(4, 3), picks(4, 0), rows(4, 3)),
            lambda: (rows(4, 3), picks(4, 0, 1, 2), rows(4, 3)),
            lambda: (rows(4, 3), picks(4), rows(4, 3)),
            lambda: (rows(4, 3), picks(4, 0, 1, 2, 3), rows(2, 3)),
        ],
    ),
    "split_by_lengths": Attack(
        SplitByLengths,
        [
            lambda: (rows(6, 2), lengths(1, 2, 3)),
            lambda: (rows(6, 2), lengths(6, 0, 0)),
            lambda: (rows(6, 2), lengths(1, 2, 2)),
        ],
    ),
}


class ScrambledExperts(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        return torch.stack([expert(x.transpose(0, 1).reshape(x.shape)) for expert in self.experts], 1)


class HalfScrambledExperts(ScrambledExperts):
    def forward(self, x):
        swapped = x.t().contiguous().view(x.shape[0], x.shape[1])
        return torch.stack([e(x if i % 2 else swapped) for i, e in enumerate(self.experts)], 1)


class LastRowGate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x[x.shape[0] - 1 :])


class FirstRowMinus(nn.Module):
    def forward(self, x):
        return x - x[:1], x[:1] * x.sigmoid()


class BatchSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x).softmax(0) * x


class RolledGate(nn.Module):
    def forward(self, x):
        return x * torch.tanh(torch.roll(x, 1, 0)) + x.flip(0)


class RowsMixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x.reshape(4, -1).t().reshape(x.shape)) + self.l(x)


class ScrambledHeads(nn.Module):
    """The bug that many implementations of attention have: view where a transpose is meant."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, 2, length, 4) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return (scores @ v).reshape(batch, length, 8), (scores @ v).transpose(1, 2).reshape(batch, length, 8)


class ScrambledPairs(nn.Module):
    def forward(self, x):
        gram = x @ x.transpose(1, 2)
        other = x @ x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1])
        wrong = x @ x.reshape(x.shape[0], x.shape[2], x.shape[1])
        i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
        return gram[:, i, j], wrong[:, i, j], other


class ScrambledSum(nn.Module):
    def forward(self, x):
        y = x.permute(2, 0, 1).reshape(x.shape)
        return 0.5 * (x.sum(1) ** 2 - (y * y).sum(1)), (x * y).sum(-1)


class ScrambledLookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(4))

    def forward(self, x):
        rows = torch.stack([t(x[:, i] % 9) for i, t in enumerate(self.tables)], 1)
        return rows.transpose(0, 1).reshape(x.shape[0], -1), rows.transpose(1, 2).reshape(x.shape[0], -1)


class MeanOfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 1)

    def forward(self, x):
        return self.l(x - x.mean(0, keepdim=True)) * x.amax(0), x / (x.norm(dim=0, keepdim=True) + 1)


def at_one(model, *shape: int) -> Attack:
    """Captured at one row, called with others."""
    return Attack(model, [lambda n=n: (rows(n, *shape),) for n in (1, 5, 2, 1, 8)])


def at(model, first: tuple[int, ...], *others: tuple[int, ...]) -> Attack:
    return Attack(model, [lambda s=s: (rows(*s),) for s in (first, *others)])


ONE_ROW = {
    "scrambled_experts": at_one(ScrambledExperts, 4),
    "scrambled_experts_square": at(ScrambledExperts, (4, 4), (1, 4), (3, 4), (8, 4)),
    "half_scrambled_experts": at_one(HalfScrambledExperts, 4),
    "last_row_gate": at_one(LastRowGate, 6),
    "first_row_minus": at_one(FirstRowMinus, 6),
    "batch_softmax": at_one(BatchSoftmax, 4),
    "rolled_gate": at_one(RolledGate, 5),
    "rows_mixed": at_one(RowsMixed, 4),
    "scrambled_heads": at_one(ScrambledHeads, 1, 8),
    "scrambled_pairs": at_one(ScrambledPairs, 3, 3),
    "scrambled_sum": at_one(ScrambledSum, 4, 4),
    "mean_of_batch": at_one(MeanOfBatch, 4),
    "scrambled_lookups": Attack(ScrambledLookups, [lambda n=n: (ids(n, 4),) for n in (1, 4, 3, 7)]),
}


class BatchByFields(nn.Module):
    """Sizes are compared where batch, fields and dim are one number."""

    def forward(self, x):
        return torch.einsum("bfd,bgd->bfg", x, x), torch.einsum("bfd,bfe->bde", x, x), x.sum(0) * x.sum(1)


class TransposedSum(nn.Module):
    def forward(self, x):
        return x.sum(1), x.transpose(0, 1).sum(1), x.transpose(1, 2).sum(1)


class SoftmaxAxes(nn.Module):
    def forward(self, x):
        return x.softmax(0) + x.softmax(1) + x.softmax(2)


class VectorBroadcast(nn.Module):
    """[B] beside [B, B]: along the rows or along the columns."""

    def forward(self, x, v):
        return x * v, x * v[:, None], x * v[None, :]


class MatmulByBatch(nn.Module):
    def forward(self, x, y):
        return x @ y, x.t() @ y, x @ y.t() if x.shape[1] == y.shape[1] else x


class WeightByBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(rows(4, 4))

    def forward(self, x):
        return F.linear(x, self.w), x @ self.w, (self.w @ x.t()).t(), self.w[: x.shape[0], : x.shape[1]] * x


class LengthIsDim(nn.Module):
    def forward(self, seq, query):
        scores = (seq * query[:, None]).sum(-1)
        return (scores.softmax(1).unsqueeze(-1) * seq).sum(1), (scores.softmax(0).unsqueeze(1) @ seq).squeeze(1)


class StackOrCat(nn.Module):
    def forward(self, x, y):
        return torch.stack([x, y]).flatten(0, 1), torch.cat([x, y], 1).view(2 * x.shape[0], -1), torch.stack([x, y], 2)


class GatherSquare(nn.Module):
    def forward(self, x):
        order = x.argsort(1)
        return x.gather(1, order), x.gather(0, order % x.shape[0]), x.index_select(0, order[0] % x.shape[0])


class LayerNormOfBatch(nn.Module):
    def forward(self, x):
        return F.layer_norm(x, x.shape[1:]), F.normalize(x, dim=0), F.normalize(x, dim=1)


class OuterSquare(nn.Module):
    def forward(self, x):
        return (x[:, :, None] * x[:, None, :]).flatten(1), (x[:, None] - x[None]).abs().sum(-1)


COINCIDING = {
    "batch_by_fields": at(BatchByFields, (4, 4, 4), (5, 5, 4), (3, 3, 4), (4, 4, 4), (2, 7, 4)),
    "transposed_sum": at(TransposedSum, (4, 4, 4), (2, 4, 4), (4, 3, 4), (1, 1, 4)),
    "softmax_axes": at(SoftmaxAxes, (3, 3, 3), (1, 3, 3), (3, 5, 3), (2, 1, 3)),
    "vector_broadcast": Attack(
        VectorBroadcast, [lambda n=n: (rows(n, n), rows(n)) for n in (4, 6, 1)] + [lambda: (rows(3, 5), rows(5))]
    ),
    "matmul_by_batch": Attack(
        MatmulByBatch,
        [lambda n=n: (rows(n, n), rows(n, n)) for n in (4, 2, 1)] + [lambda: (rows(3, 5), rows(5, 2))] * 2,
    ),
    "weight_by_batch": at(WeightByBatch, (4, 4), (2, 4), (7, 4), (1, 4)),
    "length_is_dim": Attack(
        LengthIsDim, [lambda s=s: (rows(*s), rows(s[0], s[2])) for s in ((4, 4, 4), (2, 7, 4), (4, 1, 4), (1, 4, 4))]
    ),
    "stack_or_cat": Attack(StackOrCat, [lambda s=s: (rows(*s), rows(*s)) for s in ((4, 4), (2, 6), (3, 1), (1, 1))]),
    "gather_square": at(GatherSquare, (4, 4), (6, 4), (3, 5), (2, 2)),
    "layer_norm_of_batch": at(LayerNormOfBatch, (5, 5), (2, 5), (1, 5), (7, 5)),
    "outer_square": at(OuterSquare, (4, 4), (2, 4), (6, 3), (1, 4)),
}
