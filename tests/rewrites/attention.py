"""Models with attention, in the spellings of different libraries, and what looks like it. Their input is x [B, 3]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, D = 7, 5


class Dice(nn.Module):
    """Data adaptive activation; `dim` of the channels, as deepctr and others have it."""

    def __init__(self, channels: int, dim: int = -1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels, eps=1e-8)
        self.norm.running_mean.uniform_(-0.2, 0.2)
        self.norm.running_var.uniform_(0.5, 2)
        self.alpha = nn.Parameter(torch.rand(channels) - 0.3)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        p = torch.sigmoid(self.norm(flat))
        return (p * flat + (1 - p) * self.alpha * flat).view(shape)


BATCHES = (0, 1, 2, 9)


class Pooled(nn.Module):
    """Queries, keys and lengths out of x; the attention unit is the subclass's `forward`."""

    channels = (6, 4)

    def __init__(self, dtype: torch.dtype = torch.float32, parts: int = 4) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, D, dtype=dtype))
        self.key = nn.Parameter(torch.randn(3, T * D, dtype=dtype))
        hidden, second = self.channels
        self.unit = nn.Sequential(
            nn.Linear(parts * D, hidden), nn.ReLU(), nn.Linear(hidden, second), nn.Sigmoid(), nn.Linear(second, 1)
        ).to(dtype)
        self.eval()

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.to(self.query.dtype)
        lengths = (x[:, 0].abs() * 4).long().clamp(max=T)
        return x @ self.query, (x @ self.key).view(-1, T, D), torch.arange(T) < lengths.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        scores = self.unit(torch.cat([q, k, q - k, q * k], -1)).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        return (weights.unsqueeze(-1) * k).sum(1)


class WithoutMask(Pooled):
    """deepctr: plain weights, a bmm."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        scores = self.unit(torch.cat((q, k, q - k, q * k), dim=2)).transpose(1, 2)
        scores = torch.where(mask.unsqueeze(1), scores, torch.zeros_like(scores))
        return torch.bmm(scores, k).squeeze(1)


class Scaled(Pooled):
    """The original TensorFlow code, ported: repeat and view, padding by where, a scaled softmax, matmul."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.repeat(1, T).view(-1, T, D)
        scores = self.unit(torch.cat([q, k, q - k, q * k], dim=-1)).view(-1, 1, T)
        padding = torch.ones_like(scores) * (-(2**32) + 1)
        scores = torch.where(mask.view(-1, 1, T), scores, padding) / D**0.5
        return torch.matmul(F.softmax(scores, dim=-1), k).view(-1, D)


class Multiplied(Pooled):
    """A mask that weighs, another order of the parts, values that are no keys, no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1).repeat(1, T, 1)
        scores = self.unit(torch.cat([k * q, k - q, q, k], -1))
        values = torch.tanh(k)
        return torch.sum(scores * mask.unsqueeze(-1).float() * values, dim=1)


class Added(Pooled):
    """A mask that is added; the parts broadcast; the rows are flat in front of the layers."""

    def __init__(self) -> None:
        super().__init__(parts=3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1)
        parts = torch.cat([q - k, k, q * k], -1).view(-1, 3 * D)
        scores = self.unit(parts).view(-1, T)
        weights = F.softmax(scores * 0.5 + (1.0 - mask.float()) * -1e4, dim=1)
        return torch.einsum("bt,btd->bd", weights, k)


class WithDice(Pooled):
    def __init__(self) -> None:
        super().__init__()
        del self.unit
        self.first, self.second, self.third = nn.Linear(4 * D, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 1)
        self.dice, self.prelu = Dice(6), nn.PReLU(4)
        self.norm = nn.BatchNorm1d(4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1).expand_as(k)
        y = self.dice(self.first(torch.cat([q, k, q - k, q * k], -1)))
        y = self.prelu(self.norm(self.second(y).transpose(1, 2))).transpose(1, 2)
        scores = self.third(F.dropout(y, 0.5, self.training))
        scores = scores.masked_fill(~mask.unsqueeze(-1), float("-1e9"))
        return (torch.softmax(scores, 1).transpose(1, 2) @ k).squeeze(1)


class Scores(Pooled):
    """Nothing is summed: the scores themselves are the result, and the keys are scored against two queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        scores = torch.tanh(self.unit(torch.cat([q, k, 2 * q - k * 0.5, -(q * k)], -1)))
        return scores.squeeze(-1)


class Weights(Pooled):
    """The weights are a result too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, mask = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        scores = self.unit(torch.cat([q, k, q - k, q * k], -1)).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        return (weights.unsqueeze(-1) * k).sum(1), weights


class SoftmaxOverRows(Pooled):
    """Normalized over the wrong dim: the scores may be one operator, the softmax may not."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        weights = self.unit(torch.cat([q, k, q - k, q * k], -1)).softmax(0)
        return (weights * k).sum(1)


class SeenInside(Pooled):
    """The first layer's result is used elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.sides(x)
        q = q.unsqueeze(1).expand(-1, T, -1)
        first = self.unit[0](torch.cat([q, k, q - k, q * k], -1))
        scores = self.unit[1:](first).squeeze(-1)
        return (scores.softmax(-1).unsqueeze(-1) * k).sum(1) + first.mean((1, 2)).unsqueeze(-1)


class TrainedDice(WithDice):
    """Batch statistics mix the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dice.train()


TARGET = (Pooled, WithoutMask, Scaled, Multiplied, Added, WithDice, Scores, Weights, SoftmaxOverRows)


class TiledQueries(Pooled):
    """The whole batch of queries, one copy after the other: what a view makes of it mixes rows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.sides(x)
        q = q.unsqueeze(1).repeat(1, T, 1, 1).view(-1, T, D)
        return (self.unit(torch.cat([q, k, q - k, q * k], -1)).softmax(1) * k).sum(1)


NOT_TARGET = (SeenInside, TrainedDice, TiledQueries)


class Heads(nn.Module):
    """AutoInt: projections by tensordot, heads by split and stack, merged by split and cat."""

    heads, length, width = 2, 5, 8

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fields = nn.Parameter(torch.randn(3, self.length * self.width, dtype=dtype) * 0.2)
        self.projections = nn.ParameterList(torch.randn(self.width, self.width, dtype=dtype) * 0.3 for _ in range(3))
        self.eval()

    def sides(self, x: Tensor) -> list[Tensor]:
        fields = (x.to(self.fields.dtype) @ self.fields).view(-1, self.length, self.width)
        return [torch.tensordot(fields, weight, dims=([-1], [0])) for weight in self.projections]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.stack(torch.split(side, 4, dim=2)) for side in self.sides(x))
        weights = torch.softmax(torch.einsum("bnik,bnjk->bnij", q, k), dim=-1)
        result = torch.matmul(weights, v)
        return torch.cat(torch.split(result, 1), dim=-1).squeeze(0).flatten(1)


class HeadsInTheBatch(Heads):
    """The TensorFlow way: heads beside the rows, scale behind. Eager does not accept an empty batch."""

    batches = (1, 2, 9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(torch.split(side, 4, dim=2), dim=0) for side in self.sides(x))
        scores = torch.bmm(q, k.transpose(1, 2)) / 2.0
        result = torch.bmm(F.softmax(scores, dim=2), v)
        return torch.cat(torch.split(result, x.shape[0], dim=0), dim=2).reshape(-1, 40)


class TransposedHeads(Heads):
    """view and transpose, a mask of keys by masked_fill, dropout, weights that are a result too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (side.view(-1, 5, 2, 4).transpose(1, 2) for side in self.sides(x))
        padding = (x[:, :1] + torch.arange(5.0) > 3.5)[:, None, None, :]
        scores = torch.matmul(q * 0.5, k.transpose(-2, -1)).masked_fill(padding, -1e9)
        weights = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training)
        return torch.matmul(weights, v).transpose(1, 2).contiguous().view(-1, 40), weights


class Einsums(Heads):
    """Einsums throughout, a causal mask that is added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (2, 4)) for side in self.sides(x))
        causal = torch.full((5, 5), float("-inf")).triu(1)
        scores = torch.einsum("blhd,bshd->bhls", q, k) * 0.5 + causal
        return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v).flatten(1)


class EllipsisEinsums(Heads):
    """Einsums whose batch dims are an ellipsis; heads by movedim, which is one more spelling of a permutation."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (2, 4)).movedim(1, 2) for side in self.sides(x))
        scores = torch.einsum("...qd,...kd->...qk", q, k) * 0.5
        return torch.einsum("...qk,...kd->...qd", scores.softmax(-1), v).swapaxes(1, 2).flatten(1)


class Library(Heads):
    """nn.MultiheadAttention with a padding mask; its weights are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return self.attention(q, k, v)[0].flatten(1)


class LibraryLengthFirst(Library):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.transpose(0, 1) for side in self.sides(x))
        return self.attention(q, k, v)[0].transpose(0, 1).flatten(1)


class HeadsOfFields(Heads):
    """view(B * heads, -1, D) without a transposition: each head has half of the fields, and all of their channels."""

    batches = (1, 2, 9)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.view(len(x) * 2, -1, 4) for side in self.sides(x))
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(2), v).view(len(x), -1, 8).flatten(1)


class OneQuery(Heads):
    """One query of a row pools the fields, without heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = torch.matmul(q[:, 2:3], k.transpose(1, 2)) * 0.3
        return torch.bmm(scores.softmax(-1), v).squeeze(1)


class HeadsOverRows(Heads):
    """Normalized over the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(1), v).flatten(1)


class KeysAndValuesSwapped(Heads):
    """The product sums over the channels of the values: no weighted sum of rows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        weights = torch.bmm(q.transpose(1, 2), k).softmax(-1)
        return torch.bmm(v, weights).flatten(1)


class WeightsReadFirst(Heads):
    """Others read the weights before the values are computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.sides(x)
        weights = torch.softmax(q @ k.mT, -1)
        entropy = (weights * weights.log()).sum(-1)
        return weights @ torch.tanh(v), entropy


SELF = (
    Heads, HeadsInTheBatch, TransposedHeads, Einsums, EllipsisEinsums, Library, LibraryLengthFirst, OneQuery,
    WeightsReadFirst, HeadsOfFields,
)  # fmt: skip
NOT_SELF = (HeadsOverRows, KeysAndValuesSwapped)
