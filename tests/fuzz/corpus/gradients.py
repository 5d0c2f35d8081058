"""Gradients at bounds and ties, and over empty axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


def bounds(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    """Rows of which some land exactly on 0, 1 and 6."""
    return (torch.randint(-1, 4, (B, 4)).mul(torch.rand(B, 1) < 0.6).float() * 2,)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.m = nn.Linear(4, 4)
        with torch.no_grad():
            self.l.weight.copy_(torch.eye(4) / 2)
            self.l.bias.zero_()

    def act(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.act(self.l(x)))


@graph(bounds, captured=(8, 4), later=((8, 4), (5, 4)), grad=True)
class Relu6(Bounded):
    def act(self, x: Tensor) -> Tensor:
        return F.relu6(x * 3)


@graph(bounds, captured=(8, 4), later=((8, 4), (5, 4)), grad=True)
class Relu6BehindALinear(Bounded):
    def act(self, x: Tensor) -> Tensor:
        return F.relu6(x)


@graph(bounds, captured=(8, 4), later=((8, 4), (5, 4)), grad=True)
class Hardtanh(Bounded):
    def act(self, x: Tensor) -> Tensor:
        return F.hardtanh(x)


@graph(bounds, captured=(8, 4), later=((8, 4), (5, 4)), grad=True)
class ClampMin(Bounded):
    def act(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


@graph(bounds, captured=(8, 4), later=((8, 4), (5, 4)), grad=True)
class Maximum(Bounded):
    def act(self, x: Tensor) -> Tensor:
        return torch.maximum(x, torch.zeros_like(x))


def sequences(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, L, 4, requires_grad=True), torch.randn(B, 4, requires_grad=True)


@graph(sequences, later=((3, 0), (0, 3), (2, 5)), grad=True)
class SoftmaxOfNothing(nn.Module):
    """Attention over a padded length of 0."""

    def forward(self, x: Tensor, q: Tensor) -> Tensor:
        scores = torch.bmm(x, q.unsqueeze(2)).squeeze(2) / 2
        return torch.bmm(torch.softmax(scores, -1).unsqueeze(1), x).squeeze(1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 5, requires_grad=True),), captured=(3, 5), grad=True)
class OneRowWithoutAnAxis(nn.Module):
    """A linear layer of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.sum(0))


def sequence(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, L, 2),)


@graph(sequence, captured=(3, 4), later=((2, 0), (1, 2)), grad=True)
class QueryOfNoPositions(nn.Module):
    """A query that is NaN where there are no positions has no part in the gradients of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        query = x.mean(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        scores = self.net(torch.cat([query, x, query - x, query * x], -1)).squeeze(-1)
        return torch.einsum("bl,bld->bd", scores.softmax(-1), x)


def features(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 8, 4),)


class Lanes(nn.Module):
    """Lanes that one call computes; eager's stack of them is memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def lanes(self, x: Tensor) -> list[Tensor]:
        return [torch.sigmoid(tower(x[:, i])) for i, tower in enumerate(self.towers)]


@graph(features, captured=(1, 1), later=((1, 1), (3, 1)), grad=True)
class EditedStack(Lanes):
    """Through .data autograd does not see the edit of what backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        stack = torch.stack(self.lanes(x), 1)
        stack.data.mul_(0.5)
        return stack


@graph(features, grad=True, outputs=("stack",), edited="stack")
class StackThatTheCallerEdits(Lanes):
    """What is returned is the caller's to edit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.lanes(x))


@graph(features, grad=True, outputs=("h", "scores"), edited="h")
class EditedHiddenLayer(nn.Module):
    """The backward of h + w needs no h; that of a fused program does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        return h, torch.sigmoid(h + self.w) * 2 + 1


@graph(features, grad=True, outputs=("h", "scores"))
class ResultsInResults(EditedHiddenLayer.model):  # type: ignore[name-defined,misc]
    """The scores have a gradient in h, which a fused program computes from x; and so has a view of h in h itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, scores = super().forward(x)
        flat = h.flatten(1)
        return h, scores, flat, torch.tanh(flat + 1) * 3


@graph(features, grad=True, outputs=("h", "scores"), edited="h")
class ResultItsMakerKeeps(EditedHiddenLayer.model):  # type: ignore[name-defined,misc]
    """Who keeps its own result has it to itself; the later result is computed from what is returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x) * 2 + self.w
        return h, torch.sigmoid(h + 1) * 2 + self.w


@graph(lambda B, L, fill=0.6: (torch.randint(0, 2, (B, 1)),), captured=(2, 2), grad=True, outputs=("pairs", "rows"))
class ResultReadTwice(nn.Module):
    """A sum that is looked up and pooled at once does not pass through the rows; their squares still do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        return 0.5 * (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1, keepdim=True), rows


@graph(features, captured=(4, 1), later=((300, 1),), grad=True, outputs=("scores",), edited="scores")
class EditedActivation(Lanes):
    """A cat of one piece is memory of its own in eager; ours is what a chain of layers gave, and keeps for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.lanes(x)[:1], -1)


@graph(features, grad=True, outputs=("attended", "x"), edited="x")
class InputReturned(nn.Module):
    """An input that is a result as well; eager's attention keeps scaled copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.scaled_dot_product_attention(self.layer(x.flip(0)), x, x.flip(1)), x


def three(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(B, 2, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return q, k, v


@graph(three, captured=(2, 2), dtype=torch.bfloat16, grad=True, outputs=("attended",), edited="attended")
class EditedAttention(nn.Module):
    """What an operator of ours returns is no view that must not be edited."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(1, 2) / 1.7, -1) @ v


def transposed(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(4, L, B).transpose(0, 2),)


@graph(transposed, later=((6, 2), (3, 5)), grad=True, outputs=("first", "rest", "scores"), edited="first")
class EditedInputOfNoMatrix(nn.Module):
    """A linear layer keeps a copy of rows that no strides make a matrix; their parts are the caller's to edit."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Hardtanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, rest = x.split([1, 3], -1)
        return first, rest, self.mlp(x).sum(2, keepdim=True)


@graph(lambda B, L, fill=0.6: (torch.randint(0, 9, (B, L)),), grad=True, outputs=("pooled", "rows"))
class PooledByItsOwnScores(nn.Module):
    """The sum has a gradient in the rows on two ways, through their scores and past them: one operator has both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        return (rows * torch.softmax(rows @ self.w, 1).unsqueeze(-1)).sum(1), rows


@graph(lambda B, L, fill=0.6: (torch.randint(0, 9, (B, L)),), captured=(4, 1), grad=True, outputs=("stack", "scores"))
class EqualToWhatIsRead(PooledByItsOwnScores.model):  # type: ignore[name-defined,misc]
    """A stack of all pieces has the values of the rows, but no score has a gradient in it."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        return torch.stack(list(rows.unbind(1)), 1), torch.softmax(rows @ rows.mT, -1) @ rows


@graph(lambda B, L, fill=0.6: (torch.randn(B, 4),), grad=True, outputs=("bounded", "flat", "twin", "turned", "scores"))
class AlreadyOfItsForm(nn.Module):
    """h flattened to its form is h itself, and so is what is contiguous; what is computed once more is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        turned = x.unsqueeze(1).transpose(1, 2).reshape(x.shape)
        return h.clamp(min=0), h.flatten(1), self.layer(x), turned.contiguous(), turned * 2 + 1


def query_and_keys(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, 4), torch.randn(B, L, 4, requires_grad=True)


@graph(query_and_keys, grad=True, outputs=("scores", "first", "other"), edited="first")
class EditedViewOfAQuery(nn.Module):
    """Eager keeps a copy of the query for backward, and what a reshape made of it: neither is the query itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.Linear(8, 1), nn.PReLU(), nn.Linear(1, 1))
        self.l = nn.Linear(4, 2)

    def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        other = self.l(query.transpose(0, 1).reshape(query.shape)) * 2
        pairs = torch.cat([keys, query.unsqueeze(1).expand(-1, keys.shape[1], -1)], -1)
        scores = (self.attend(pairs) * keys).sum(1)
        return scores, torch.tensor_split(query, 2, -1)[0], other


def weighted_bags(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.arange(B * L) % 8, torch.arange(0, B * L, L), torch.randn(B * L, requires_grad=True)


@graph(weighted_bags, captured=(4, 3), later=((0, 3), (3, 5)), grad=True)
class WeightsOfNoBags(nn.Module):
    """The weights of a batch without rows have an empty gradient, not none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 4, mode="sum")

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.table(ids, offsets, weights)


def target_and_history(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, 4), torch.randn(B, L, 4)


@graph(target_and_history, grad=True, training=True, outputs=("pooled", "pairs"))
class ResultBehindAnOpaqueNorm(nn.Module):
    """The pairs have gradients through the parameters of a norm whose momentum is a mean: an opaque module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.attend = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, target: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        query = self.norm(target)[:, None].expand_as(history)
        pairs = torch.cat([query, history, query * history], 2)
        scores = self.attend(pairs).squeeze(-1)
        return torch.einsum("bl,bld->bd", scores, history), pairs


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 2),), captured=(2, 2), later=((3, 4), (2, 2)), grad=True)
class ContiguousResult(nn.Module):
    """contiguous() gives back its argument, which the other result is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))
        self.l = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pooled = (x * torch.softmax(x @ self.w, 1).unsqueeze(-1)).sum(1)
        return pooled.contiguous(), self.l(pooled)


@graph(
    lambda B, L, fill=0.6: (torch.randn(B, 3, 4), torch.randn(B, 4)),
    captured=(2, 2),
    grad=True,
    outputs=("found", "out"),
    edited="found",
)
class EditedPartOfALayer(nn.Module):
    """An edit of a result is no error where only an input that asks for no gradient made eager keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.second = nn.Sequential(nn.Linear(12, 1), nn.Tanh(), nn.Linear(1, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(y)
        found = hidden[:, 1:]
        spread = hidden.unsqueeze(1).expand(-1, x.shape[1], -1)
        return found, self.second(torch.cat([spread, x, spread * x], 2)).squeeze(-1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 1),), captured=(2, 2), later=((4, 4), (3, 5)), grad=True)
class EditedPastAutograd(nn.Module):
    """A layer's result is a view in eager, and an edit through detach() makes autograd take it for another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.l(x)
        turned = y.mT.reshape(y.shape)
        y.detach().mul_(0.5)
        return y, turned


@graph(lambda B, L, fill=0.6: (torch.randn(B, L, 4).requires_grad_(),), grad=True)
class ViewsWithoutGradients(nn.Module):
    """A view that is made while gradients are off requires them, and passes none on."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        with torch.no_grad():
            viewed, cut, turned = y.view_as(y), y[:], x.mT.mT
        return viewed * 3 + x, cut.square() + x, turned.exp() + x


@graph(
    lambda B, L, fill=0.6: (torch.randn(B, 1), torch.randn(B, 2, 2)[..., 1:].requires_grad_()),
    captured=(1, 1),
    later=((1, 1),),
    grad=True,
)
class TurnedAndEdited(nn.Module):
    """One row turns into itself: the view that is edited is the caller's, and another view of it is, too."""

    def forward(self, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = y.mT.reshape(y.shape) + float(y.mT.reshape(y.shape).shape[0] == 2)  # a capture of its own for one row
        least = x.sum(0, keepdim=True)
        made = torch.where(x > least, x, least)
        turned = made.transpose(2, 0).contiguous().view(made.shape)
        again = turned.mT.reshape(turned.shape)
        turned.clamp_(-1, 1)
        return turned, again


@graph(lambda B, L, fill=0.6: (torch.randn(B, 1).requires_grad_(),), captured=(1, 3), later=((1, 3),), grad=True)
class CopiedWithoutGradients(nn.Module):
    """A product of a copy that was made while gradients were off has none, whatever else reads the copy."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            copied = x.repeat(1, 1)
        return copied @ copied.T, copied.squeeze(), x + x, copied


@graph(lambda B, L, fill=0.6: (torch.randn(B, 1, 2).requires_grad_(),), grad=True, outputs=("piece",), edited="piece")
class PieceOfASplit(nn.Module):
    """With gradients torch refuses to edit one of several views, and a view of one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(piece.squeeze(1) for piece in (x * 2).split(1, 1))


@graph(lambda B, L, fill=0.6: (torch.randn(B, L).requires_grad_(),), captured=(3, 2), later=((3, 2),), grad=True)
class BroadcastToItself(nn.Module):
    """broadcast_tensors gives back a view that fits already: another object than what it is a view of."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        viewed = x[0 : x.shape[0]]
        return viewed, torch.broadcast_tensors(viewed, viewed)[0], x.mT


@graph(lambda B, L, fill=0.6: (torch.randn(1, B).t().requires_grad_(),), captured=(2, 2), later=((3, 2),), grad=True)
class ViewBesideAnEdit(nn.Module):
    """The edit leaves no gradient, and a view from before it has a way of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(0, 1)
        view = torch.squeeze(turned, 1)
        with torch.no_grad():
            turned.relu_()
        return view.swapaxes(0, 1), turned


@graph(
    lambda B, L, fill=0.6: (torch.randn(B, 3, 3).requires_grad_(), torch.randn(B, L, 2)),
    captured=(2, 2),
    later=((3, 2), (0, 0)),
    grad=True,
)
class GradientOfNoRows(nn.Module):
    """What has no rows is contiguous by torch's word, whatever its strides are."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        row, column = torch.tril_indices(3, 3, -1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, row, column]
        return torch.einsum("ab,acd->adc", dots, y)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 4),), captured=(2, 2), later=((0, 0), (3, 5)), grad=True)
class ScaledByAMean(nn.Module):
    """The mean of no rows is NaN: rows are scaled by it, of which there are none, and not the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * x.mean(0, keepdim=True))
