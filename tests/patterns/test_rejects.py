"""What looks like a column and must be left alone, with a reason that a user understands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.patterns.found import Spelling, assert_eager, executable, findings, plans
from tests.patterns.test_spellings import FLAT, IDS, MASK, OFFSETS, ROWS, cat

Forward = Callable[..., Any]


def edited_ids(m: Spelling, i: Tensor) -> Tensor:
    i = i.clone()
    i[1:].clamp_(0, 9)  # part of it: stays an edit
    return m.e(i)


def edited_ids_after_use(m: Spelling, i: Tensor) -> tuple[Tensor, Tensor]:
    i = i + 0
    looked_up = m.e(i)
    i[1:].add_(1)
    return looked_up, i


def edited_table(m: Spelling, i: Tensor) -> Tensor:
    scaled = m.w * 2
    scaled[1:].add_(1)
    return F.embedding(i % 20, scaled)


def edited_mask(m: Spelling, i: Tensor, k: Tensor) -> Tensor:
    k = k * 2
    rows = m.e(i) * k.unsqueeze(-1)
    pooled = rows.sum(1)
    k[1:].add_(1)
    return pooled + k.sum()


def edited_condition(i: Tensor) -> Tensor:
    large = i > 3
    large[1:].logical_not_()
    return torch.where(~large, 0, i)


def edited_constant(i: Tensor) -> Tensor:
    zeros = torch.zeros_like(i)
    zeros[1:].add_(5)
    return torch.where(i > 3, zeros, i)


def edited_filling(m: Spelling, i: Tensor) -> Tensor:
    zeros = torch.zeros(1, 1, 1)
    zeros[:1].add_(5)
    return torch.where((i != 0).unsqueeze(-1), m.e(i), zeros).sum(1)


REJECTED: dict[str, tuple[str, Forward, tuple[Tensor, ...]]] = {
    "ids edited before": ("edited in place", edited_ids, (IDS,)),
    "ids edited after": ("edited in place", edited_ids_after_use, (IDS,)),
    "table edited": ("edited in place", edited_table, (IDS,)),
    "max_norm": ("edited in place", lambda m, i: F.embedding(i % 20, m.w.detach(), max_norm=1.0), (IDS,)),
    "a single lookup": ("a single plain lookup", lambda m, i: m.e(i), (IDS,)),
}


@pytest.mark.parametrize("name", REJECTED)
def test_no_call_and_the_reason(name: str) -> None:
    reason, forward, args = REJECTED[name]
    model = Spelling(forward)
    made = executable(model, args)
    assert plans(made) == []
    assert any(reason in miss.reason for miss in findings(made).misses), findings(made).misses
    if "max_norm" not in name:
        assert_eager(made, model, args)


def test_one_hot_without_the_number_of_rows() -> None:
    """Its width depends on the data: capture or the pattern refuses, eager's answer stays."""
    from fxopt.config import Config
    from fxopt.optimize import optimize

    model = Spelling(lambda m, i: F.one_hot(i).float() @ m.w)
    ids = torch.tensor([3, 19])
    fast = optimize(model, (ids,), Config(verify="off"))
    with torch.no_grad():
        assert torch.equal(fast(ids), model(ids))


def test_one_hot_of_other_ids_than_int64_raises_as_in_eager() -> None:
    from fxopt.config import Config
    from fxopt.optimize import optimize

    model = Spelling(lambda m, i: F.one_hot(i, 20).float() @ m.w + m.e(i))
    for first in ((IDS.int(),), (IDS % 20, IDS.int())):
        fast = optimize(model, config=Config(verify="off", tune="off"))
        for ids in first[:-1]:
            fast(ids)
        with pytest.raises(RuntimeError, match="one_hot"):
            fast(first[-1])


PARTLY: dict[str, tuple[int, Forward, tuple[Tensor, ...]]] = {
    # how many columns are found all the same
    "cat on dim 0": (2, lambda m, i: torch.cat([m.e(i % 20), m.f(i % 7)], 0), (IDS,)),
    "mixed dtypes": (2, lambda m, i: cat(m.e(i % 20), F.embedding(i % 7, m.w.double())), (IDS,)),
    "the mask edited": (0, edited_mask, (ROWS, MASK)),
    "what a mask fills in edited": (0, edited_filling, (ROWS,)),
    "a condition on another tensor": (1, lambda m, i, j: m.e(torch.where(j > 3, 0, i) % 20), (IDS, IDS)),
    "a condition on floats, negated": (
        1,
        lambda m, x: m.e(torch.where(~(x < 0), x, 0.0).long() % 20),
        (torch.randn(6),),
    ),
    "remainder of a float": (1, lambda m, x: m.e((x % 3).long() + 3), (torch.randn(6),)),
    "alpha": (1, lambda m, i: m.e(torch.add(i, 3, alpha=2) % 20), (IDS,)),
}


@pytest.mark.parametrize("name", PARTLY)
def test_what_does_not_fit_stays_and_the_rest_is_found(name: str) -> None:
    count, forward, args = PARTLY[name]
    model = Spelling(forward)
    made = executable(model, args)
    assert sum(len(plan.columns) for plan in plans(made)) == count
    assert_eager(made, model, args)


class Programs(nn.Module):
    """A column after a step that the kernel does not do: the program starts after it."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.step = nn.Embedding(20, 4), step

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.step(x) % 20)


@pytest.mark.parametrize(
    "step",
    [
        lambda i: i >> 64,
        lambda i: i * i.roll(1),
        lambda i: i.cumsum(0),
        lambda i: torch.where(i > 3, i, i + 1),
        lambda i: i.masked_fill(i.roll(1) > 3, 0),
        lambda i: i.flip(0),
        lambda i: torch.add(i, 1, alpha=3),
        lambda i: torch.where((i > 3) & (i < 9), 0, i),  # one WHERE asks for one of several comparisons, not for all
        lambda i: torch.where((i > 3) | (i + 1 < 2), 0, i),
        edited_condition,
        edited_constant,
    ],
)
def test_the_program_starts_after_what_it_cannot_do(step: Callable[[Tensor], Tensor]) -> None:
    model = Programs(step)
    made = executable(model, (IDS,))
    (plan,) = plans(made)
    assert [instr.op.name for instr in plan.columns[0].program] == ["REMAINDER"]
    assert_eager(made, model, (IDS,))


GRADIENTS: dict[str, tuple[str, Callable[[], nn.Module], Forward, tuple[Tensor, ...]]] = {
    "sparse": ("sparse", lambda: nn.Embedding(20, 4, sparse=True), lambda m, i: m(i % 20), (IDS,)),
    "sparse bag": (
        "sparse",
        lambda: nn.EmbeddingBag(20, 4, mode="sum", sparse=True),
        lambda m, i, o: m(i, o),
        (FLAT, OFFSETS),
    ),
    "scaled": ("scale", lambda: nn.Embedding(20, 4, scale_grad_by_freq=True), lambda m, i: m(i % 20), (IDS,)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_only_eager_gives(name: str) -> None:
    """Left alone with gradients on, found with gradients off."""
    reason, table, forward, args = GRADIENTS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table()

        def forward(self, *args: Tensor) -> Any:
            return forward(self.table, *args)

    model = Model()
    with_gradients = executable(model, args, grad=True)
    assert plans(with_gradients) == []
    assert any(reason in miss.reason for miss in findings(with_gradients).misses)
    without = executable(model, args)
    assert len(plans(without)) == 1
    assert_eager(without, model, args)


def test_a_row_that_pads_is_read_by_a_pooled_embedding() -> None:
    """nn.Embedding's padding_idx is about gradients; only a bag leaves the row out."""
    model = Spelling(lambda m, i: torch.cat([m.e(i).sum(1), m.e(i).mean(1), m.e(i).amax(1)], 1))
    model.e = nn.Embedding(20, 4, padding_idx=0)
    with torch.no_grad():
        model.e.weight.normal_()
    ids = torch.tensor([[0, 3, 0], [0, 0, 0], [1, 2, 3]])
    made = executable(model, (ids,))
    (plan,) = plans(made)
    assert len(plan.columns) == 3
    assert_eager(made, model, (ids,))
