"""Strides and aliases that a caller sees, and sizes that a kernel must survive."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


def broadcast(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, L), torch.randn(B, 4)


@graph(broadcast, captured=(4, 4), later=((3, 0), (0, 3), (3, 5)))
class OutputAlsoBroadcast(nn.Module):
    """An output that is also broadcast along an axis which may be 0."""

    def forward(self, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sigmoid(y) * 2
        return y.view(y.shape[0], 1, y.shape[1], 1), y.unsqueeze(2) * w.unsqueeze(1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 1).t(), torch.randn(1, 1)), captured=(4, 4), later=((1, 1), (5, 4)))
class ProductByOne(nn.Module):
    """A product over an inner size of 1: its result is contiguous, whatever its inputs are."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x.t(), y)


@graph(lambda B, L, fill=0.6: (torch.randn(4, B).t(), torch.randn(4, 1)), captured=(4, 4), later=((1, 1), (5, 4)))
class OuterProduct(nn.Module):
    """A product that is a mul takes no strides from a transposed input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:, None, :].mT @ y.t()[:, :1]


def turned(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, L, 1).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(),)


@graph(turned, captured=(3, 5), grad=False)
class OfWidthOne(nn.Module):
    """A linear layer of one input and one output is a product, and its result contiguous whatever it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.left(x) @ self.right(x).mT, self.left(x)


@graph(turned, captured=(3, 5), grad=False)
class DetachedView(nn.Module):
    """A view of an input requires a gradient even where none is recorded; one of what was detached does not."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        detached = x.detach()
        return detached.transpose(1, 2), detached.reshape(x.shape), detached.unbind(2)[0]


@graph(turned, captured=(3, 5), grad=False)
class FilledNowhere(nn.Module):
    """What masked_fill gives is contiguous, where its mask never holds too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        positive = torch.exp(-x.abs())
        return positive.expand(-1, -1, 2).masked_fill(positive < 0, 0), positive.masked_fill(positive < 0, 0)


@graph(turned, captured=(3, 5), grad=False)
class NormFirst(nn.Module):
    """torch's operator for inference gives a contiguous result where the layer's own sum follows its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 2, 2, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.expand(-1, -1, 2))


def apart(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, L, 2)[..., 0], torch.randn(B, 3, L)


@graph(apart, captured=(3, 5), grad=False)
class RowsApart(nn.Module):
    """A weight that is computed may have strides in both its axes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y @ x.T


def twice(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, L, 8), torch.randn(B, 8, 8)


@graph(twice, captured=(3, 5))
class SameFactorTwice(nn.Module):
    """A contraction reads one tensor as two factors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("abc,adc->abd", x, (y.unsqueeze(2) * y.unsqueeze(1)).reshape(y.shape[0], -1, 8))


def matrix(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 5),)


@graph(matrix, captured=(3, 5), later=((5, 1), (4, 4)))
class ProductOfATranspose(nn.Module):
    """An einsum that sums nothing has the strides of what it reads: here of a copy, also where the matrix is square."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ab,ab->ab", x.transpose(0, 1).contiguous().view(x.shape), x)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 1, 3),), captured=(3, 5))
class NormOfOne(nn.Module):
    """The fake norm of torch 2.11 keeps an axis of length 1."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        norm = torch.linalg.vector_norm(x, dim=-2).clamp(-1, 1)
        return norm * norm.sum(-1, keepdim=True), torch.linalg.vector_norm(x[..., :1], dim=(1, 2))


def scrambled(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 4, 4).transpose(0, -1).contiguous().transpose(0, -1),)


@graph(scrambled, captured=(2, 4), later=((3, 5), (1, 4)), grad=False)
class SummedBeforeTheProduct(nn.Module):
    """An einsum that sums what one operand has alone still multiplies element by element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("abc,dce->cba", torch.exp(x - x.amax(-3, keepdim=True)), x)


def turned(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(2, B).t(),)


@graph(turned, captured=(4, 1), later=((5, 1), (1, 1)), grad=False, many=True)
class ColumnsOfJoinedRows(nn.Module):
    """What follows the strides of an input is not joined of chunks of rows, which are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = (x * x).exp() + x
        left, right = y.split(1, 1)
        return left.squeeze(1), right.squeeze(1), y * self.l(y) + y, torch.stack([x, y], 1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 3),), captured=(3, 3))
class NormOfATransposedInput(nn.Module):
    """A batch norm's result lies row by row on a CPU, whatever its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y if y.is_contiguous() else y * 2


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 2),), captured=(1, 2), later=((1, 2), (3, 4)), grad=False)
class SumOfRegroupedPairs(nn.Module):
    """A product of matrices whose axes are turned and joined is a view, also where its fake value is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y.unsqueeze(2) * y.unsqueeze(1)).reshape(y.shape[0], -1, 2).sum(-3)


def channels_last(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    image = torch.randn(B, 3, L, 2)
    return (image.to(memory_format=torch.channels_last) if B != 2 else image,)


@graph(channels_last, captured=(4, 4), later=((3, 5), (2, 2)))
class Convolved(nn.Module):
    """A convolution of images keeps their channels last, and is no linear where the caller sees its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def heads(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return tuple(torch.randn(B, 4, L, 1) for _ in range(3))


@graph(heads, captured=(3, 5), later=((1, 4), (6, 4), (2, 7)))
class TurnedAttention(nn.Module):
    """What is a transposed view in eager is one in the graph: its transpose is contiguous, for a caller's view()."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], 4)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2).requires_grad_(),), captured=(1, 1), later=((3, 1),), grad=False)
class ReshapesThatRequireGradients(nn.Module):
    """A view of what requires gradients requires them also where there are none, a copy does not: one row decides."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.mT.reshape(x.shape)
        return y + 1 if y.requires_grad else y * 3


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 1),), captured=(2, 2), later=((9, 4), (2, 2)), grad=False)
class ProductsOverOneSize(nn.Module):
    """An einsum that sums over a size of 1 lies as its operands do."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("abc,abc->ba", x, x)
        return y if y.is_contiguous() else y * 2


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2),), captured=(2, 2), later=((4, 5), (1, 1)), grad=False)
class PieceOfATower(nn.Module):
    """A tower's result and the one piece it is cut into share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, other = [torch.sigmoid(tower(x)) for tower in self.towers]
        return one, other.chunk(1, -1)[0], other


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 2),), captured=(2, 2), later=((4, 5), (1, 1)), grad=False)
class WeightsOfThemselves(nn.Module):
    """An attention whose values are its weights, turned, is none."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.mT * 2, -1)
        return weights @ weights.mT


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 4), torch.randn(B, L, 4)), captured=(3, 2), later=((4, 1), (3, 1)))
class SumOverOneTurned(nn.Module):
    """A copy of what is turned is contiguous, and a sum over one step lies as its operand does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turned = x.transpose(-1, 0).contiguous().view(x.shape)
        weights = self.net(torch.cat([turned, y], dim=-1)).squeeze(-1)
        return torch.einsum("bl,bld->bd", weights, turned)


def turned_leaf(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(2, B).t().requires_grad_(),)


@graph(turned_leaf, later=((3, 2), (1, 1)), grad=False)
class ViewOfWhatMayBeAnInput(nn.Module):
    """The function returns its argument itself. A view of that is another tensor, which asks for no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.broadcast_tensors(x, x)[0].unsqueeze(0).squeeze(0)


@graph(turned_leaf, later=((3, 2), (1, 1)), grad=False)
class TurnedTwice(nn.Module):
    """The same of another function."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.atleast_2d(x).transpose(0, 1).transpose(0, 1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 1),), captured=(2, 2), later=((5, 3), (1, 1)))
class SumOverOneStepInAnotherOrder(nn.Module):
    """It lies as its operands do, so that turning it back and copying it gives the sum itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        summed = torch.einsum("abc,abc->ba", x, x)
        return summed.transpose(-1, 0).contiguous().view(summed.shape), summed


def rows(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 4),)


@graph(rows, captured=(2, 2), later=((2, 2), (8, 8)), grad=True, outputs=("v0", "v1"), edited="v0", many=True)
class ComparedAndEdited(nn.Module):
    """A maximum keeps what it is taken of, but no gradient comes back to one that is only compared."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v0 = x * torch.sigmoid(self.gate(x))
        turned = torch.where(v0.amax(1, keepdim=True) > 0, v0, -v0)
        return v0, sum(torch.sigmoid(tower(turned)) for tower in self.towers)  # type: ignore[return-value]


def columns_first(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(4, B).t(),)


@graph(columns_first, captured=(2, 2), later=((2, 2), (3, 5)))
class ProductOfACopy(nn.Module):
    """The first operand is contiguous, and so is their product, also where it is read of the tensor behind the copy."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ab,ab->ab", x.contiguous(), x)
