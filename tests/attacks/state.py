"""State that forward writes, reads between edits, and effects in front of a failure."""

from __future__ import annotations

import copy
import types
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attacks.attack import Attack
from tests.attacks.sizes import ids, rows


def thrice(model, *shape: int, **options) -> Attack:
    return Attack(model, [lambda n=n: (rows(n, *shape),) for n in (3, 3, 5, 1)], **options)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.l = nn.Linear(4, 2)

    def forward(self, x):
        self.steps = self.steps + 1
        return self.l(x) * self.steps


class CountingBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.l = nn.Linear(4, 2)

    def forward(self, x):
        self.steps = self.steps + 1
        return self.l(x) / self.steps


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(4)

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x - self.mean


class RunningInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.plain.copy_(self.mean * 2)
        return (x - self.mean) * self.plain


class Ema(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Linear(4, 3)
        self.target = copy.deepcopy(self.online)

    def forward(self, x):
        self.target.weight.data.mul_(0.9).add_(self.online.weight.data, alpha=0.1)
        return self.online(x), self.target(x)


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            self.l.weight.mul_(0.5)
        return self.l(x)


class DecayThenPython(Decay):
    """The weights are edited, then the capture fails."""

    def forward(self, x):
        self.l.weight.data.mul_(0.5)
        return self.l(x) if float(x.sum()) > 1e9 else self.l(x) * 2


class History(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen: list = []
        self.window = deque(maxlen=2)
        self.totals = {"calls": 0}
        self.l = nn.Linear(4, 2)

    def forward(self, x):
        self.seen.append(x.shape[0])
        self.window.append(len(self.seen))
        self.totals["calls"] += 1
        return self.l(x) + self.totals["calls"]


class Helper:
    def __init__(self):
        self.value = torch.ones(4)
        self.calls = 0

    def update(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.value = self.value * 0.5 + x.mean(0)
        return self.value


class HelperObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.helper = Helper()
        self.told = (0, 0.0)

    def forward(self, x):
        y = x * self.helper.update(x)
        self.told = (self.helper.calls, float(self.helper.value.sum()))
        return y


class HelperInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(mean=torch.ones(4), steps=0)

    def forward(self, x):
        self.state.steps += 1
        self.state.mean.add_(x.mean(0))
        return x * self.state.mean / self.state.steps


class KeepsScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 3)
        self.scores = None

    def forward(self, x):
        self.scores = self.l(x).softmax(-1)
        return self.scores * 2


class BatchNormTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(4)
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.n(self.l(self.n(x)))


class SwapsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        self.l.weight.data = self.l.weight.data * 0.5
        return self.l(x)


class EditsInput(nn.Module):
    def forward(self, x):
        x.mul_(2)
        y = x[:, 1:] + 1
        x[:, 0] = 7
        return y, x.sum()


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.d = nn.Dropout(0.5)

    def forward(self, x):
        return self.d(self.l(x)) + torch.rand(4) + F.dropout(x, 0.3)


ONCE = {
    "counting": thrice(Counting, 4),
    "counting_buffer": thrice(CountingBuffer, 4),
    "running_mean": thrice(RunningMean, 4),
    "running_in_place": thrice(RunningInPlace, 4),
    "ema": thrice(Ema, 4),
    "decay": thrice(Decay, 4),
    "decay_then_python": thrice(DecayThenPython, 4),
    "history": thrice(History, 4),
    "helper_object": thrice(HelperObject, 4),
    "helper_in_place": thrice(HelperInPlace, 4),
    "keeps_scores": thrice(KeepsScores, 4),
    "batch_norm_twice": Attack(BatchNormTwice, [lambda n=n: (rows(n, 4),) for n in (3, 5, 3)], grad=True),
    "swaps_data": thrice(SwapsData, 4),
    "edits_input": thrice(EditsInput, 4),
    "dropped": thrice(Dropped, 4),
    "ema_with_gradients": thrice(Ema, 4, grad=True),
}


class Monotone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x):
        for layer in self.layers:
            layer.weight.data.clamp_(min=0)
            x = torch.relu(layer(x))
        return x


class MonotoneDetached(Monotone):
    def forward(self, x):
        for layer in self.layers:
            layer.weight.detach()[0].clamp_(min=0)
            x = torch.tanh(layer(x))
        return x


class MonotoneExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x):
        found = []
        for e in self.experts:
            e.weight.data.abs_()
            found.append(F.relu(e(x)))
        return torch.stack(found, 1)


class PaddingRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(3))

    def forward(self, x):
        found = []
        for i, t in enumerate(self.tables):
            with torch.no_grad():
                t.weight[0].zero_()
            found.append(t(x[:, i]))
        return torch.cat(found, 1)


class OneTableEdited(nn.Module):
    """The same rows before and after an edit."""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(20, 4)

    def forward(self, x):
        before = self.t(x)
        self.t.weight.data[3:].mul_(2)
        after = self.t(x)
        self.t.weight.data[3:].mul_(0.5)
        return torch.cat([before, after], -1)


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(20, 4, max_norm=0.5)
        self.u = nn.Embedding(20, 4)

    def forward(self, x):
        first = self.t.weight.sum()
        return torch.cat([self.t(x), self.u(x), self.t(x + 1)], -1), first, self.t.weight.sum()


class TiedByView(nn.Module):
    def __init__(self):
        super().__init__()
        base = rows(6, 4)
        self.register_buffer("base", base)
        self.register_buffer("head", base[:2])
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        a = x @ self.base.t()
        self.head.mul_(2)
        b = x @ self.base.t()
        self.base[0] = 1
        return a, b, x @ self.head.t()


class EditsBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        a = self.l(x)
        torch.add(self.l.bias.data, 1, out=self.l.bias.data)
        b = self.l(x)
        torch._foreach_mul_([self.l.bias.data, self.l.weight.data], 0.5)
        return a, b, self.l(x)


class EditsThroughNumpyOfBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        a = x * self.scale
        self.scale.view(2, 2)[1].add_(1)
        return a, x * self.scale, (x * self.scale).sum(0)


class InputEditedBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        a = self.l(x)
        x.data[:, 0] = 3
        b = self.l(x)
        x.detach().view(-1).add_(1)
        return a, b, self.l(x)


class OutputIsEditedState(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x):
        view = self.sums[1:]
        copy = self.sums.clone()
        self.sums += x.sum(0)
        return view * 1, view, copy


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        w = self.l.weight
        w.data.div_(w.data.norm(dim=1, keepdim=True))
        y = self.l(x)
        w.data[:, 0] = 0
        return y + self.l(x), w.sum()


def looked_up(model, columns: int) -> Attack:
    return Attack(model, [lambda n=n: (ids(n, columns, below=18),) for n in (3, 5, 1)])


BARRIERS = {
    "monotone": thrice(Monotone, 4),
    "monotone_detached": thrice(MonotoneDetached, 4),
    "monotone_experts": thrice(MonotoneExperts, 4),
    "monotone_experts_with_gradients": thrice(MonotoneExperts, 4, grad=True),
    "padding_rows": Attack(PaddingRows, [lambda n=n: (torch.randint(0, 3, (n, 3)),) for n in (4, 6, 1)]),
    "one_table_edited": looked_up(OneTableEdited, 2),
    "max_norm": looked_up(MaxNorm, 2),
    "tied_by_view": thrice(TiedByView, 4),
    "edits_bias": thrice(EditsBias, 4),
    "edits_a_view": thrice(EditsThroughNumpyOfBuffer, 4),
    "input_edited_between": thrice(InputEditedBetween, 4),
    "output_is_edited_state": thrice(OutputIsEditedState, 4),
    "weight_normed": thrice(WeightNormed, 4),
}


class BufferThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.t = nn.Embedding(10, 4)

    def forward(self, x, y):
        self.calls.add_(1)
        y.mul_(2)
        return self.t(x).sum(1) + y * self.calls


class LookupThenBuffer(BufferThenLookup):
    def forward(self, x, y):
        rows = self.t(x).sum(1)
        self.calls.add_(1)
        y.mul_(2)
        return rows + y * self.calls


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.a, self.b = nn.Embedding(30, 4), nn.Embedding(5, 4)

    def forward(self, x, y):
        first = self.a(x)
        self.seen += first.sum((0, 1))
        y[:, 0] = 9
        second = self.b(x)
        self.seen += second.sum((0, 1))
        return first + second, y * 1


class AttributeThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None
        self.t = nn.Embedding(10, 4)

    def forward(self, x, y):
        self.last = y * 2
        return self.t(x).sum(1) + self.last


class WeightThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.t = nn.Embedding(10, 4)

    def forward(self, x, y):
        self.l.weight.data.mul_(0.9)
        return self.l(self.t(x).sum(1)) + y


class TableThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.u = nn.Embedding(10, 4), nn.Embedding(10, 4)

    def forward(self, x, y):
        self.t.weight.data[0] += 1
        return self.u(x).sum(1) + self.t(x).sum(1) + y


class BufferThenAssert(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls += 1
        torch._assert((x < 10).all(), "ids below 10")
        return y + self.calls


class BufferThenGather(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, y):
        self.mean.lerp_(y.mean(0), 0.5)
        return (y - self.mean).gather(1, x % 11), y.index_select(0, x[:, 0])


class BatchNormThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(4)
        self.t = nn.Embedding(10, 4)

    def forward(self, x, y):
        return self.n(y) + self.t(x).sum(1)


class DropoutThenLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(10, 4)

    def forward(self, x, y):
        return F.dropout(y, 0.5) + self.t(x).sum(1)


class BagAfterCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.zeros(1)
        self.bag = nn.EmbeddingBag(10, 4)

    def forward(self, x, y):
        self.steps += 1
        return self.bag(x) * self.steps + y


def failing(model) -> Attack:
    """Good ids, bad ids, good ids."""
    good = lambda: (torch.randint(0, 3, (3, 2)), rows(3, 4))  # noqa: E731
    bad = lambda: (torch.randint(10, 30, (3, 2)), rows(3, 4))  # noqa: E731
    return Attack(model, [good, bad, good, bad, bad, good])


BEFORE_FAILURES = {
    "buffer_then_lookup": failing(BufferThenLookup),
    "lookup_then_buffer": failing(LookupThenBuffer),
    "two_tables": failing(TwoTables),
    "attribute_then_lookup": failing(AttributeThenLookup),
    "weight_then_lookup": failing(WeightThenLookup),
    "table_then_lookup": failing(TableThenLookup),
    "buffer_then_assert": failing(BufferThenAssert),
    "buffer_then_gather": failing(BufferThenGather),
    "batch_norm_then_lookup": failing(BatchNormThenLookup),
    "dropout_then_lookup": failing(DropoutThenLookup),
    "bag_after_counter": failing(BagAfterCounter),
}
