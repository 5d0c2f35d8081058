"""Questions about data whose answers both compute something: the first call's is taken; the other one is eager's."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxopt import Config, export, optimize, report
from fxopt.export import ExportError
from fxopt.runtime import dispatcher_of
from fxopt.runtime.entry import REFUSED

CONFIG = Config(tune="off")


class Model(nn.Module):
    """Asks in the middle, behind what a call changes: a count, running means, random numbers."""

    def __init__(self, ask: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.gru, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rows = self.table(x)
        y = self.ask(self, x, rows)
        return self.out(self.drop(self.norm(y.tanh())))


def branch(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    return rows.sum(1) if (x > 40).any() else rows.mean(1)


def some_rows(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    """As DIEN's evolution layer in torch-rechub: the sequences that are not empty."""
    mask, hidden = (x > 40).any(1), torch.zeros_like(rows)
    if mask.any():
        hidden[mask] = model.gru(rows[mask])[0]
    return hidden.sum(1)


def repaired(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    y = rows.sum(1) / (x > 40).sum(1, keepdim=True)
    if torch.isinf(y).any() or torch.isnan(y).any():
        y = torch.nan_to_num(y, posinf=1.0, neginf=-1.0)
    return y


def of_numbers(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    most, share = x.max().item(), (x > 40).float().mean().item()
    return rows.sum(1) * (2 if most > 40 and share >= 0.0 else 3)


def of_rows_left(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    left = (x[:, 0] > 40).nonzero().squeeze(1)
    return rows.sum(1).index_add(0, left, rows[left, 0]) if len(left) else rows.sum(1)


def of_numbers_drawn(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    y = torch.dropout(rows.sum(1), 0.5, model.training)
    return y if (y > 0).any() and (torch.rand(3) > 0.2).any() else torch.rand_like(y)


def loop(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    y = (x > 40).float().sum(1, keepdim=True) + rows.sum(1) * 0.01
    while (y > 0.9).any():
        y = y / 2
    return y


def of_filled_rows(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    """Behind an edit of what the forward has made, as the auxiliary loss of DIEN in torch-rechub."""
    mask, filled = (x > 40).any(1), torch.zeros_like(rows)
    filled[mask] = model.gru(rows[mask])[0]
    before, after = filled[:, :-1][x[:, 1:] < 20], filled.sum(1)
    if (filled[:, 0] != 0).any():
        filled += 1.0
    return after + before.mean() if before.size(0) > 0 and (filled > 0.9).any() else after


def of_what_is_edited(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    """Of a buffer and of an input, before and behind what the forward writes to them, and behind running means."""
    early = bool(model.calls > 0) and bool((x[:, 0] < 60).all())
    model.calls.mul_(2.0)
    if not model.training:  # where backward needs x
        x[:, 1] = x.amax(1) + 20
    y = model.norm(rows.sum(1))
    if (y.isnan().any() or (x[:, :2].amax(1) > (40 if model.training else 64)).any()) and early and model.calls > 1:
        y = y * 2.0
    return y + (model.calls > 1e6)


def before_an_edit(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    """The second question is about what was computed before an edit that the first is behind."""
    filled = torch.zeros_like(rows)
    early = filled + rows.detach().clamp(0.0, 0.1)
    filled[(x > 40).any(1)] = 5.0
    y = rows.sum(1) if (filled > 4.0).any() else rows.mean(1)
    return y if (early > 4.0).any() else y * 2.0


def longest(model: Model, x: Tensor, rows: Tensor) -> Tensor:
    """Without a question: the end of a slice is a tensor."""
    count = (x > 40).sum(1)
    n = count.max() + 1
    return (rows[:, :n] * (torch.arange(n)[None] <= count[:, None]).unsqueeze(-1)).sum(1)


ASKS = [branch, some_rows, repaired, of_numbers, of_rows_left, of_numbers_drawn, of_filled_rows, of_what_is_edited]
ASKS += [before_an_edit, loop]


def ids(batch: int, yes: bool) -> Tensor:
    x = torch.randint(0, 40, (batch, 4))
    if yes and batch:
        x[torch.randint(batch, (1,)), 0] = 45
    return x


def entry_of(fast: nn.Module) -> Any:
    (entry,) = dispatcher_of(fast).entries
    return entry


def assert_alike(model: nn.Module, fast: nn.Module, x: Tensor) -> None:
    """Results, edited inputs, gradients, buffers, and how many random numbers were drawn."""
    seen = []
    for each in (model, fast):
        torch.manual_seed(7)
        for parameter in each.parameters():
            parameter.grad = None
        given = x.clone()
        y = each(given)
        if y.requires_grad:
            y.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
        seen.append([y.detach(), given, gradients, dict(each.named_buffers()), torch.rand(1)])
    torch.testing.assert_close(seen[1], seen[0], equal_nan=True)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("training", [False, True])
def test_either_answer_is_eagers(ask: Callable, training: bool) -> None:
    model = Model(ask).train(training)
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.set_grad_enabled(training):
        for batch, yes in ((5, True), (3, True), (4, False), (7, True), (2, False), (1 + training, True)):
            assert_alike(model, fast, ids(batch, yes))
    assert entry_of(fast).executable and entry_of(fast).executable.capture.taken


def test_a_slice_may_end_at_a_tensor() -> None:
    model = Model(longest).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for batch in (5, 3, 8, 1):
        assert_alike(model, fast, torch.randint(30, 50, (batch, 4)))
    entry = entry_of(fast)
    assert entry.executable and not entry.executable.capture.taken and not entry.refused


def test_a_report_says_where_and_which() -> None:
    fast = optimize(Model(branch).eval(), (ids(5, True),), CONFIG)
    text = " ".join(str(report(fast)).split())
    assert "test_answers.py" in text and "is for the answer yes; calls with the other one are eager" in text


def test_a_first_call_that_is_no_example_is_forgotten() -> None:
    """One with zeros, say, to warm up."""
    model = Model(branch).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for number in range(REFUSED + 3):
        assert_alike(model, fast, ids(4, yes=number > 0))
    entry = entry_of(fast)
    assert entry.executable.capture.taken and not entry.refused


class Whole(nn.Module):
    """The question lies in a submodule, which may be one opaque call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Model(branch), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).sigmoid())


def test_where_answers_change_time_and_again_none_is_taken() -> None:
    model = Whole().eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for number in range(8 * REFUSED):
        assert_alike(model, fast, ids(4, yes=number % 2 == 0))
    capture = entry_of(fast).executable.capture
    assert not capture.taken and [leaf.path for leaf in capture.leaves] == ["inner"]


def test_one_other_answer_in_ten_changes_nothing() -> None:
    model = Model(branch).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    assert_alike(model, fast, ids(4, True))
    entry = entry_of(fast)
    for number in range(12 * REFUSED):
        assert_alike(model, fast, ids(4, yes=number % 10 > 0))
    assert entry_of(fast) is entry


def test_a_loop_over_data_is_no_question() -> None:
    def steps(model: Model, x: Tensor, rows: Tensor) -> Tensor:
        y = rows.sum(1)
        while (y.abs() > 1e-9).any():
            y = y / 2
        return y

    model = Model(steps).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    assert_alike(model, fast, ids(4, True))
    assert entry_of(fast).executable is None


def test_a_program_takes_no_answer() -> None:
    with pytest.raises(ExportError, match="asks about data"):
        export(Model(branch).eval(), (ids(5, True),), config=CONFIG)


def test_under_torch_compile() -> None:
    model = Model(branch).eval()
    fast = optimize(copy.deepcopy(model), (ids(4, True),), CONFIG)
    compiled = torch.compile(fast, backend="eager")
    with torch.no_grad():
        for yes in (True, False, True, True):
            x = ids(4, yes)
            torch.testing.assert_close(compiled(x), model(x))


def test_gradients_are_on_again_behind_a_question_without_them() -> None:
    def quiet(model: Model, x: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            scale = rows.mean()
            if (x > 40).any():
                scale = scale * 2
        return rows.sum(1) * scale

    model = Model(quiet)
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for yes in (True, False, True, False):
        assert_alike(model, fast, ids(4, yes))
        assert torch.is_grad_enabled()
    assert entry_of(fast).executable and entry_of(fast).refused


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_on_again_behind_an_error_without_them(checkpointed: bool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)

        def rows(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                rows = self.table(x)
            return self.out(rows)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.rows, x, use_reentrant=False) if checkpointed else self.rows(x)

    fast = optimize(Frozen(), (ids(4, True),), CONFIG)
    assert entry_of(fast).executable
    with pytest.raises(IndexError):
        fast(ids(4, True) + 50)
    assert torch.is_grad_enabled() and fast(ids(4, True)).requires_grad


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (mean := x.mean().item()) != mean,
        lambda x: x.mean().item() != x.mean().item(),
        lambda x: not (mean := x.mean().item()) <= mean,
        lambda x: (mean := x.mean().item()) - mean != 0,
        lambda x: not abs(x.mean().item()) >= 0,
        lambda x: (count := (x > 0).sum().item()) * 0.3 - count * 0.2 < 1.0,
        lambda x: abs((x > 0).sum().item() - 11) == True,  # noqa: E712
    ],
)
def test_numbers_are_no_algebra(ask: Callable[[Tensor], bool]) -> None:
    """x - x is no 0 where x is infinite, x == x is not true where it is no number, and sums are rounded."""

    class Guarded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x) if ask(x) else super().forward(x)

    model = Guarded(4, 4).eval()
    fast = optimize(model, config=CONFIG)
    ten = (torch.arange(12) < 10).float().view(3, 4)
    for x in (torch.ones(3, 4), torch.full((3, 4), torch.nan), torch.full((3, 4), torch.inf), ten):
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)
    assert entry_of(fast).executable.capture.taken


class Checked(nn.Module):
    """Asks about what is computed behind a check, from data that the check refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.diff()
        if (lengths < 0).any() or offsets[-1] > values.shape[0]:
            raise ValueError("bad offsets")
        y = torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)  # reads what lengths say
        return self.out(y * 2 if (y > 2).any() else y)


def test_what_a_check_refuses_is_not_computed_on() -> None:
    model = Checked().eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    bad, good = torch.tensor([0, 10**10, 30, 40]), torch.tensor([0, 3, 3, 9])
    for offsets in (bad, good, good, good, bad, good):
        values = torch.rand(9, 4)
        if offsets is bad:
            with pytest.raises(ValueError, match="bad offsets"):
                fast(values, offsets)
        else:
            torch.testing.assert_close(fast(values, offsets), model(values, offsets))
    assert entry_of(fast).executable.capture.taken


NUMBERS: dict[str, Callable[[Any, Any, Tensor], bool]] = {
    "== 1": lambda flag, n, mask: flag == 1,
    "!= 0": lambda flag, n, mask: flag != 0,
    "1 ==": lambda flag, n, mask: 1 == flag,  # noqa: SIM300
    "== 1.0": lambda flag, n, mask: flag == 1.0,
    "== True": lambda flag, n, mask: flag == True,  # noqa: E712
    "in": lambda flag, n, mask: flag in (1, 2),
    "eq": lambda flag, n, mask: operator.eq(flag, 1),
    "== number": lambda flag, n, mask: flag == n,
    "> 0 == 1": lambda flag, n, mask: (n > 0) == 1,
    "== > 0": lambda flag, n, mask: flag == (n > 0),
    "tolist": lambda flag, n, mask: mask.any().tolist() == 1,
    "item of list": lambda flag, n, mask: mask.tolist()[0] == 1,
    "a key": lambda flag, n, mask: {True: 1, False: 0}[flag] == 1,
    "a text": lambda flag, n, mask: flag == "a",
    "item is True": lambda flag, n, mask: mask.any().item() is True,
    "True is": lambda flag, n, mask: True is mask.any().item(),
    "is a variable": lambda flag, n, mask, want=True: mask.any().item() is want,
    "tolist is True": lambda flag, n, mask: mask.tolist()[0] is True,
    "> 0 is True": lambda flag, n, mask: (n > 0) is True,
    "is not False": lambda flag, n, mask: (n > 1) is not False,
}


@pytest.mark.parametrize("question", NUMBERS)
@pytest.mark.parametrize("yes_first", [False, True])
def test_a_truth_compared_with_a_number(question: str, yes_first: bool) -> None:
    def ask(model: Model, x: Tensor, rows: Tensor) -> Tensor:
        mask = x[:, 0] > 40
        return rows.sum(1) * (100 if NUMBERS[question](mask.any().item(), mask.sum().item(), mask) else 1)

    model = Model(ask).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for call in range(4):
        x = torch.randint(0, 40, (4, 4))
        if (call + yes_first) % 2:
            x[:, 0] = 45
        assert_alike(model, fast, x)
