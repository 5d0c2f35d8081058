"""State and effects exactly once: counters, moving means, weights that a call edits, calls that fail."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


def rows(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return (torch.randn(B, 4),)


class Counter(nn.Module):
    """A buffer that each call replaces by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return torch.relu(self.l(x)) * self.steps


COUNTER = graph(rows)(Counter)
COUNTER_AT_THE_FIRST_CALL = graph(rows, example=False)(Counter)
COUNTER_VERIFIED = graph(rows, example=False, verify="first")(Counter)


class MovingMean(nn.Module):
    """A mean of what was seen, read by the call that updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x - self.mean


MOVING_MEAN = graph(rows)(MovingMean)
MOVING_MEAN_AT_THE_FIRST_CALL = graph(rows, example=False, verify="first")(MovingMean)


class Number(nn.Module):
    """A plain number that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x * self.steps


NUMBER = graph(rows)(Number)
NUMBER_AT_THE_FIRST_CALL = graph(rows, example=False)(Number)


class Teacher(nn.Module):
    """A second network that follows the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(4, 4)
        self.target = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.target.weight.data.mul_(0.9).add_(self.online.weight.data * 0.1)
        return self.online(x), self.target(x)


TEACHER = graph(rows)(Teacher)
TEACHER_AT_THE_FIRST_CALL = graph(rows, example=False, verify="first")(Teacher)


class Decay(nn.Module):
    """A weight that decays at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.l.weight.mul_(0.99)
        return torch.relu(self.l(x))


DECAY = graph(rows)(Decay)
DECAY_AT_THE_FIRST_CALL = graph(rows, example=False, verify="first")(Decay)


def bad_ids(B: int, L: int, fill: float = 0.6) -> tuple[Tensor, ...]:
    return torch.randn(B, 4), torch.full((B,), 3 if fill > 0.5 else 12)


class EditsThenFails(nn.Module):
    """A call that edits a buffer and its input, and then meets a bad id."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(4))
        self.e = nn.Embedding(10, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.steps.add_(1)
        x.mul_(2)
        return self.e(ids) + x


EDITS_THEN_FAILS = graph(bad_ids, later=((4, 4, 0.0), (3, 4, 1.0), (2, 4, 0.0)))(EditsThenFails)
EDITS_THEN_FAILS_VERIFIED = graph(bad_ids, later=((4, 4, 0.0), (3, 4)), verify="first")(EditsThenFails)


class BatchNormOfOneRow(nn.Module):
    """Eager counts the batch, and then refuses its one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


BATCH_NORM_OF_ONE_ROW = graph(rows, training=True, later=((1, 4), (3, 4)))(BatchNormOfOneRow)
BATCH_NORM_OF_ONE_ROW_AT_FIRST = graph(rows, training=True, captured=(1, 4), example=False)(BatchNormOfOneRow)


@graph(rows, training=True, later=((1, 4), (3, 4)))
class AveragingBatchNorm(nn.Module):
    """Eager counts the batch, and then refuses its one row; the count is a factor of the average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 8, requires_grad=True), torch.randn(B, 8)), grad=True)
class EditsWhatWasComputed(nn.Module):
    """An input that autograd has made may be edited, where a leaf may not."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.transpose(0, -1).mul_(2)
        return self.l(x) * torch.sigmoid(y)


class EditsABufferBehindAView(nn.Module):
    """Functions that give several views of what they get, and say so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(1.0, 9.0).reshape(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        torch.broadcast_tensors(self.rows, x[:1])[0].mul_(0.9)
        torch.meshgrid(self.rows[0], x[0], indexing="ij")[0][:, 0].add_(1)
        torch.atleast_3d(self.rows, x)[0].mul_(0.5)
        torch.unsafe_chunk(self.rows, 2)[1].add_(2)
        return x * self.rows.sum()


EDITS_A_BUFFER_BEHIND_A_VIEW = graph(rows)(EditsABufferBehindAView)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 4),), grad=False)
class EditsALayerBehindAView(nn.Module):
    """The layer is replaced, and the function that gave views of its result declares none."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        torch.unsafe_chunk(y, 2)[0].mul_(0.5)
        return y


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2, 2),), captured=(2, 2), later=((3, 2), (0, 2)), grad=False)
class SelectsNothing(nn.Module):
    """A batch of none has no last row: eager has edited the buffer once before it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.total.copy_(self.total * 0.5)
        return x.select(0, -1)


@graph(lambda B, L, fill=0.6: (torch.randn(2, B).t(),), captured=(1, 1), later=((4, 1), (5, 5)), grad=False)
class ViewThatFails(nn.Module):
    """One row can be flattened however it lies. Of more the view fails, and the edit before it happens once."""

    def forward(self, x: Tensor) -> Tensor:
        x.t().mul_(2)
        return x.view(-1)


@graph(lambda B, L, fill=0.6: (torch.randn(B, L).requires_grad_(),), captured=(2, 3), later=((2, 2), (4, 1)), grad=True)
class EditsAViewMadeWithoutGradients(nn.Module):
    """Where the reshape is a view, torch forbids its use behind the edit, which happened once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            view = x.mT.reshape(x.shape)
        view.detach().add_(1)
        return view.transpose(0, -1).contiguous()


@graph(lambda B, L, fill=0.6: (torch.randn(B, 2),), captured=(3, 2), later=((2, 2), (4, 2)), grad=False)
class AddsWhatOverlaps(nn.Module):
    """Where the reshape is a view of x, turned, torch refuses the sum, and the edit before it happened once."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x.mT.reshape(x.shape)
        x.detach().add_(1)
        turned += x
        return turned


@graph(
    lambda B, L, fill=0.6: (torch.randn(B, 1), torch.randn(B, L)), captured=(2, 1), later=((3, 4), (2, 1)), grad=False
)
class EditsWhatIsBroadcast(nn.Module):
    """One column for many is refused, behind an edit that happened once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return x.expand_as(y).add_(y)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3).requires_grad_(),), captured=(4, 2), later=((3, 2), (2, 2)), grad=True)
class PieceOfWhatWasEdited(nn.Module):
    """Of three rows the reshape is a view, and torch refuses the piece behind the edit, which happened once."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        piece = x.split(1, 0)[0]
        turned = x.mT.reshape(x.shape)
        turned.mul_(0.5)
        return turned, piece.expand(piece.shape)


@graph(lambda B, L, fill=0.6: (torch.randn(B, 4).requires_grad_(),), grad=True)
class EditsOneOfSeveralViews(nn.Module):
    """torch refuses the edit, though nobody else reads what it edits."""

    def forward(self, x: Tensor) -> Tensor:
        piece = (x * 2).chunk(1, -1)[0]
        return torch.relu_(torch.nn.functional.dropout(piece, 0.5, False))


@graph(lambda B, L, fill=0.6: (torch.randn(B, L),), captured=(1, 1), later=((3, 2), (2, 3)), grad=False)
class AddsItsOwnDiagonal(nn.Module):
    """What an edit reads through another view of the same memory may be refused, or be read when it was edited."""

    def forward(self, x: Tensor) -> Tensor:
        made = x.clone()
        made += made.diagonal()
        return made


@graph(lambda B, L, fill=0.6: (torch.randn(B, 3)[:, 1:2],), captured=(1, 1), later=((1, 2), (3, 2)), grad=False)
class CopiesItselfOntoItself(nn.Module):
    """Of one row torch refuses the copy of a view onto another one of the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        view = x.view_as(x)
        view.copy_(x)
        return torch.stack([view, view])[0]


@graph(lambda B, L, fill=0.6: (torch.randn(B, 5, 4), torch.randn(B, 5, 4)), grad=False)
class EditedInsideAttention(nn.Module):
    """One operator computes scores, queries, keys, values and masks anew, and would miss what has been edited."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        scores = q @ k.mT / 2
        scores.diagonal(dim1=1, dim2=2).fill_(-1e9)
        halved, values = q * 0.5, k.clone()
        halved[:, 0] = 0
        values[:, 0] = 0
        mask = k[:, None, :, 0] > 0
        seen = mask.clone()
        seen[:, :, 0] = True
        own = torch.softmax(scores, -1) @ k
        masked = torch.softmax((q @ k.mT).masked_fill(~seen, -1e9), -1) @ k
        return own, masked, torch.softmax(halved @ k.mT, -1) @ k, torch.softmax(q @ k.mT, -1) @ values
