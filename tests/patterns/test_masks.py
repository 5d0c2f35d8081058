"""Masked pooling of padded rows: every spelling becomes one column without a mask, and the numbers stay eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxopt.kernels.columns.plan import Column, Op
from tests.patterns.found import Spelling, assert_eager, executable, findings, plans

B, L, D = 6, 7, 4
Forward = Callable[..., Any]
ROWS = ([5, 3, 0, 0, 0, 0, 0], [0] * 7, [1, 2, 3, 4, 5, 6, 7], [0, 0, 9, 9, 0, 1, 0], [8] + [0] * 6, [0, 19] * 3 + [1])
IDS = torch.tensor(ROWS)
LENGTHS = torch.tensor([[2], [0], [7], [9], [-3], [4]])


def arange(**options: Any) -> Tensor:
    return torch.arange(L, **options)


def sum_(m: Spelling, i: Tensor, k: Tensor) -> Tensor:
    return (m.e(i) * k.unsqueeze(-1)).sum(1)


def mean_(m: Spelling, i: Tensor, k: Tensor) -> Tensor:
    return sum_(m, i, k) / (k.sum(1, keepdim=True) + 1e-8)


def max_(m: Spelling, i: Tensor, k: Tensor) -> Tensor:
    return (m.e(i) - (1 - k.unsqueeze(-1)) * 1e9).max(1).values


def deepctr_lengths(n: Tensor) -> Tensor:
    row = torch.arange(0, L, 1)
    mask = row < torch.unsqueeze(n, dim=-1)
    return torch.transpose(mask, 1, 2)


def _over_d(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(D, 2).float()


BY_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "<": lambda n: arange() < n,
    "flipped": lambda n: n > arange(),
    "<=": lambda n: arange() <= n - 1,
    "from 1": lambda n: torch.arange(1, L + 1) <= n,
    "not >=": lambda n: ~(arange() >= n),
    "logical not": lambda n: torch.logical_not(n <= arange()),
    "expanded": lambda n: arange().expand(n.shape[0], L) < n.expand(-1, L),
    "unsqueezed": lambda n: arange().unsqueeze(0) < n[:, 0].unsqueeze(1),
    "repeated": lambda n: arange()[None].repeat(n.shape[0], 1) < n,
    "int32": lambda n: arange(dtype=torch.int32) < n.int(),
    "floats": lambda n: arange(dtype=torch.float32) < n.float(),
    "float lengths": lambda n: arange() < n.float() * 0.5,
    "cast twice": lambda n: (arange() < n).int().bool(),
    "deepctr": lambda n: deepctr_lengths(n)[:, :, 0],
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_masks_from_lengths(name: str) -> None:
    if name == "deepctr":
        column = _one(lambda m, i, n: (m.e(i) * _over_d(deepctr_lengths(n))).sum(1), IDS, LENGTHS)
    else:
        column = _one(lambda m, i, n: sum_(m, i, BY_LENGTH[name](n).float()), IDS, LENGTHS)
    assert column.lengths is not None and column.weights is None and column.masked == "scaled"


BY_IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "!=": lambda i: i != 0,
    ">": lambda i: i > 0,
    "ne": lambda i: i.ne(0),
    "not ==": lambda i: ~(i == 0),
    "1 - ==": lambda i: 1 - (i == 0).float(),
    "1 - == of integers": lambda i: 1 - (i == 0).int(),
    "== of ==": lambda i: (i == 0) == 0,
    "another padding": lambda i: i != 9,
    "both": lambda i: (i != 0) & (i != 9),
    "clamped": lambda i: i.clamp(min=1) != 1,
    "bool": lambda i: i.bool(),
    "not == and": lambda i: ~(i == 0) & (i < 9),
    "not either": lambda i: ~((i == 0) | ~(i < 9)),
}


@pytest.mark.parametrize("name", BY_IDS)
def test_masks_from_ids(name: str) -> None:
    column = _one(lambda m, i: sum_(m, i.clamp(min=1) if name == "clamped" else i, BY_IDS[name](i).float()), IDS)
    assert any(step.op is Op.KEEP for step in column.program) and column.weights is None


def test_a_mask_of_what_the_ids_are_made_from() -> None:
    packed = torch.cat([torch.randn(B, 2), IDS.float()], 1)
    column = _one(lambda m, x: sum_(m, x[:, 2:].long() % 20, (x[:, 2:] != 0).float()), packed)
    assert [step.op for step in column.program] == [Op.KEEP, Op.CAST, Op.REMAINDER]


@pytest.mark.parametrize("feature", [lambda x: x[:, 1], lambda x: x[:, 1:2].squeeze(1), lambda x: x.unbind(1)[1]])
def test_one_features_part_of_a_mask_over_all(feature: Callable[[Tensor], Tensor]) -> None:
    both = torch.stack([IDS.flip(0), IDS], 1)
    column = _one(lambda m, i: mean_(m, feature(i), feature((i != 0).float())), both)
    assert column.masked == "scaled" and column.weights is None
    assert column.divisor is not None and column.divisor.source is None


def test_another_features_part_of_a_mask_is_weights() -> None:
    both = torch.stack([IDS.flip(0), IDS], 1)
    column = _one(lambda m, i: sum_(m, i[:, 1], (i != 0).float()[:, 0]), both)
    assert column.masked != "scaled" or column.weights is not None


def test_both_masks() -> None:
    column = _one(lambda m, i, n: mean_(m, i, ((i != 0) & (arange() < n)).float()), IDS, LENGTHS)
    assert column.lengths is not None and column.divisor is not None and column.divisor.source is None


POOLINGS: dict[str, tuple[str, str, Forward]] = {  # (pool, masked, of table, ids and a float mask)
    "sum": ("sum", "scaled", sum_),
    "sum, mask first": ("sum", "scaled", lambda m, i, k: (k[:, :, None] * m.e(i)).sum(1)),
    "sum, repeated mask": ("sum", "scaled", lambda m, i, k: (m.e(i) * k.unsqueeze(-1).repeat(1, 1, D)).sum(-2)),
    "sum, expanded mask": ("sum", "scaled", lambda m, i, k: (m.e(i) * k.unsqueeze(-1).expand(-1, -1, D)).sum(1)),
    "sum, expand_as": ("sum", "scaled", lambda m, i, k: (m.e(i) * k.unsqueeze(-1).expand_as(m.e(i))).sum(1)),
    "bmm": ("sum", "scaled", lambda m, i, k: torch.bmm(k.unsqueeze(1), m.e(i)).squeeze(1)),
    "matmul": ("sum", "scaled", lambda m, i, k: (k.unsqueeze(1) @ m.e(i)).squeeze(1)),
    "sum of filled": ("sum", "filled", lambda m, i, k: m.e(i).masked_fill(k.unsqueeze(-1) == 0, 0).sum(1)),
    "sum of where": ("sum", "filled", lambda m, i, k: torch.where(k.bool().unsqueeze(-1), m.e(i), 0.0).sum(1)),
    "where, flipped": ("sum", "filled", lambda m, i, k: torch.where(~k.bool().unsqueeze(-1), 0.0, m.e(i)).sum(1)),
    "mean over all": ("mean", "scaled", lambda m, i, k: (m.e(i) * k.unsqueeze(-1)).mean(1)),
    "mean": ("sum", "scaled", mean_),
    "mean, at least 1": ("sum", "scaled", lambda m, i, k: sum_(m, i, k) / k.sum(1, keepdim=True).clamp(min=1)),
    "mean, count of bools": ("sum", "scaled", lambda m, i, k: sum_(m, i, k) / (k.bool().sum(-1)[:, None] + 1)),
    "mean, count over D": (
        "sum",
        "scaled",
        lambda m, i, k: sum_(m, i, k) / (k.unsqueeze(-1).expand(-1, -1, D).sum(1) + 1e-8),
    ),
    "mean of bmm": (
        "sum",
        "scaled",
        lambda m, i, k: torch.bmm(k.unsqueeze(1), m.e(i)) / (k.sum(1).view(-1, 1, 1) + 1e-8),
    ),
    "max": ("max", "lowered", max_),
    "max, added": ("max", "lowered", lambda m, i, k: (m.e(i) + (1 - k).unsqueeze(-1) * -1e9).amax(1)),
    "max, keepdim": ("max", "lowered", lambda m, i, k: (m.e(i) - 1e12 * (1 - k[..., None])).max(1, keepdim=True)[0]),
    "max of filled": ("max", "filled", lambda m, i, k: m.e(i).masked_fill(k.unsqueeze(-1) == 0, -1e9).max(1).values),
    "max, infinity": ("max", "filled", lambda m, i, k: m.e(i).masked_fill(~k.bool()[..., None], -torch.inf).amax(1)),
    "max of where": ("max", "filled", lambda m, i, k: torch.where(k.bool()[..., None], m.e(i), -1e9).amax(1)),
}  # fmt: skip
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ids": lambda i, n: (i != 0).float(),
    "lengths": lambda i, n: (arange() < n).float(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", POOLINGS)
def test_poolings(name: str, mask: str) -> None:
    pool, masked, forward = POOLINGS[name]
    column = _one(lambda m, i, n: forward(m, i, MASKS[mask](i, n)), IDS, LENGTHS)
    assert (column.pool, column.masked, column.weights) == (pool, masked, None)
    assert (column.lengths is not None) is (mask == "lengths")
    if "mean" in name and "all" not in name:
        assert column.divisor is not None and column.divisor.source is None, "the count is taken in the kernel"


def test_mean_by_the_given_lengths() -> None:
    """Divided by what the caller says, which is not what the mask counts."""
    column = _one(lambda m, i, n: sum_(m, i, (arange() < n).float()) / (n.float() + 0.25), IDS, LENGTHS)
    assert column.divisor is not None and column.divisor.source is not None and len(column.divisor.program) == 2


def test_columns_of_dim_1() -> None:
    column = _one(lambda m, i: mean_(m, i, (i != 0).float()), IDS, table=torch.nn.Embedding(20, 1))
    assert column.divisor is not None


def test_softmax_over_what_counts() -> None:
    """Weights of zero are exact, so the kernel leaves those lanes out by itself."""

    def forward(m: Spelling, i: Tensor, n: Tensor, s: Tensor) -> Tensor:
        scores = torch.where(arange() < n, s, -1e9)
        return (m.e(i) * scores.softmax(1).unsqueeze(-1)).sum(1)

    column = _one(forward, IDS, LENGTHS, torch.randn(B, L))
    assert column.weights is not None


WEIGHTS: dict[str, Forward] = {  # masks that say nothing about the row's own ids or length: a factor per id
    "not a prefix": lambda m, i, n: sum_(m, i, (arange() != n).float()),
    "every other lane": lambda m, i, n: sum_(m, i, (torch.arange(0, 2 * L, 2) < n).float()),
    "a suffix": lambda m, i, n: sum_(m, i, (arange() >= n).float()),
    "counted down": lambda m, i, n: sum_(m, i, (torch.arange(L - 1, -1, -1) < n).float()),
    "another tensor's": lambda m, i, n: sum_(m, i, ((i + n) % 3 != 0).float()),
    "another's, bool": lambda m, i, n: (m.e(i) * ((i + n) % 3 != 0).unsqueeze(-1)).sum(1),
    "another's, integers": lambda m, i, n: (m.e(i) * ((i * n) << 40).unsqueeze(-1)).sum(1),
    "rolled": lambda m, i, n: sum_(m, i, (i.roll(1, 1) != 0).float()),
    "either": lambda m, i, n: sum_(m, i, ((i != 0) | (arange() < n)).float()),
    "scaled": lambda m, i, n: sum_(m, i, (i != 0).float() * 2),
    "2 - mask": lambda m, i, n: sum_(m, i, 2 - (i != 0).float()),
    "not of a number": lambda m, i, n: sum_(m, i, (~(i != 0).int()).float()),
    "a mean over all": lambda m, i, n: (m.e(i) * ((i + n) % 3 != 0).float().unsqueeze(-1)).mean(1),
    "half a length": lambda m, i, n: sum_(m, i, (arange() <= n.float() * 0.3).float()),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_no_mask_is_a_weight(name: str) -> None:
    column = _one(WEIGHTS[name], IDS, LENGTHS)
    assert column.weights is not None and not column.is_masked


SQUARE = torch.randint(0, 3, (D, D))
NOT_POOLED: dict[str, Forward] = {
    "dims swapped": lambda m, i, n: (m.e(i) * (i != 0).float().t().unsqueeze(-1)).sum(1),
    "over D": lambda m, i, n: (m.e(i) * (torch.arange(D) < n).float().unsqueeze(1)).sum(1),
    "summed over D": lambda m, i, n: (m.e(i) * (i != 0).float().unsqueeze(-1)).sum(2),
    "a constant that stays in the sum": lambda m, i, n: m.e(i).masked_fill((i == 0).unsqueeze(-1), 1.0).sum(1),
    "max of products": lambda m, i, n: (m.e(i) * (i != 0).float().unsqueeze(-1)).amax(1),
    "lowered beyond halves": lambda m, i, n: (m.e(i) - (1 - (i != 0).half().unsqueeze(-1)) * 1e9).amax(1),
    "flattened": lambda m, i, n: (m.e(i) * (i != 0).repeat_interleave(4).view(-1, D, 4).float()).sum(1),
    "promoted": lambda m, i, n: (m.e(i) * (i != 0).double().unsqueeze(-1)).sum(1),
}


@pytest.mark.parametrize("name", NOT_POOLED)
def test_what_is_no_masked_pooling(name: str) -> None:
    model = Spelling(NOT_POOLED[name])
    made = executable(model, (SQUARE, torch.randint(0, 4, (D, 1))))
    columns = [column for plan in plans(made) for column in plan.columns]
    assert all(column.pool == "none" or column.weights is not None for column in columns)
    assert not findings(made).rolled_back
    assert_eager(made, model, (SQUARE, torch.randint(0, 4, (D, 1))))


def test_the_count_of_another_mask_is_no_count() -> None:
    column = _one(lambda m, i, n: sum_(m, i, (i != 0).float()) / ((i != 9).sum(1, keepdim=True) + 1.0), IDS, LENGTHS)
    assert column.is_masked and column.divisor is not None and column.divisor.source is not None


def edited_mask(m: Spelling, i: Tensor, n: Tensor) -> Tensor:
    k = (i != 0).float()
    k[:, 0] = 1.0
    return sum_(m, i, k)


def edited_count(m: Spelling, i: Tensor, n: Tensor) -> Tensor:
    count = (i != 0).float().sum(1, keepdim=True)
    divisor = count.clamp_(min=3).add(1)
    count.mul_(2)
    return sum_(m, i, (i != 0).float()) / divisor


def edited_mask_of_the_count(m: Spelling, i: Tensor, n: Tensor) -> Tensor:
    k = (i != 0).float()
    k[:, 1:3] = 2.0
    return sum_(m, i, (i != 0).float()) / (k.sum(1, keepdim=True) + 1)


def edited_lengths(m: Spelling, i: Tensor, n: Tensor) -> Tensor:
    n = n * 1
    pooled = sum_(m, i, (arange() < n).float())
    n.sub_(2)
    return pooled + sum_(m, i, (arange() < n).float()) + n


@pytest.mark.parametrize("forward", [edited_mask, edited_count, edited_mask_of_the_count, edited_lengths])
def test_edited_in_place(forward: Forward) -> None:
    """Whether or not normalization has made something else of the edit."""
    model = Spelling(forward)
    made = executable(model, (IDS, LENGTHS))
    assert_eager(made, model, (IDS, LENGTHS))


def _one(forward: Forward, *args: Tensor, table: torch.nn.Embedding | None = None) -> Column:
    """The one column that `forward` becomes; its numbers are compared on these and on hostile inputs."""
    model = Spelling(forward)
    model.e = table or model.e
    made = executable(model, args)
    (plan,) = plans(made)
    assert len(plan.columns) == 1, plan.columns
    assert_eager(made, model, args)
    for rows in (0, 1):
        assert_eager(made, model, [tensor[:rows] for tensor in args])
    with torch.no_grad():
        model.e.weight[0, 0], model.e.weight[9, -1] = torch.inf, torch.nan
        assert_eager(made, model, args)
        model.e.weight.mul_(1e9)
        assert_eager(made, model, args)
    return plan.columns[0]
