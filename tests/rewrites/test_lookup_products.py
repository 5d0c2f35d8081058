"""Products of lookups without their rows: eager's numbers, eager's errors, and nothing where the rows are read too."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.rewrites import lookup_products
from tests.rewrites.test_catalogue import applied

CONFIG = fxopt.Config(tune="off", verify="full")
ROWS, FIELDS, DIM = 30, 5, 6


class Dots(nn.Module):
    """Operation-aware pairs: dot products, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = list(combinations(range(FIELDS), 2))
        self.left = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in self.pairs)
        self.right = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in self.pairs)
        self.top = nn.Linear(len(self.pairs), 3)

    def products(self, ids: Tensor) -> list[Tensor]:
        sides = zip(self.left, self.right, self.pairs, strict=True)
        return [a(ids[:, i]) * b(ids[:, j]) for a, b, (i, j) in sides]

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([p.sum(dim=1, keepdim=True) for p in self.products(ids)], dim=1))


class Stacked(Dots):
    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.stack([p.sum(-1) for p in self.products(ids)], dim=1))


class Whole(Dots):
    """The products themselves, as deepctr's ONN feeds its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(len(self.pairs) * DIM, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat(self.products(ids), dim=1))


class FieldAware(Dots):
    """A table for each field, and first orders beside the second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Embedding(ROWS, 1)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))

    def forward(self, ids: Tensor) -> Tensor:
        xs = [table(ids) for table in self.tables]
        products = torch.stack([xs[j][:, i] * xs[i][:, j] for i, j in self.pairs], dim=1)
        return self.linear(ids).sum(1) + products.sum(1).sum(1, keepdim=True)


class OneByOne(Whole):
    """Lookups of [B, 1] ids, flattened behind the cat, as in deepctr."""

    def forward(self, ids: Tensor) -> Tensor:
        sides = zip(self.left, self.right, self.pairs, strict=True)
        products = [a(ids[:, i : i + 1]) * b(ids[:, j : j + 1]) for a, b, (i, j) in sides]
        return self.top(torch.cat(products, dim=-1).flatten(1))


class ReadBefore(FieldAware):
    """What else the columns write is used ahead of the products."""

    def forward(self, ids: Tensor) -> Tensor:
        first = self.linear(ids).sum(1).exp().cumsum(1)
        return first * super().forward(ids * 1) + first


class Totals(Dots):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack(self.products(ids), 1).sum((1, 2))


class TotalOfDots(Dots):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack(self.products(ids), 1).sum(2).sum(1, keepdim=True).sigmoid()


class OverPairs(Dots):
    """Summed, but not to one number."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack(self.products(ids), 1).sum(1)


class Seen(Dots):
    """The rows leave the model as well."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        left = torch.stack([a(ids[:, i]) for a, (i, _) in zip(self.left, self.pairs, strict=True)], 1)
        right = torch.stack([b(ids[:, j]) for b, (_, j) in zip(self.right, self.pairs, strict=True)], 1)
        return (left * right).sum(2), left


class Sums(Dots):
    """Of pairs, and not of vectors."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack(self.products(ids), 1).exp().sum(1)


class OneForAll(Dots):
    """All rows by one of them."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([a(ids[:, i]) for a, (i, _) in zip(self.left, self.pairs, strict=True)], 1)
        return (rows * rows[:, :1]).sum(2)


class Doubles(Dots):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def ids_of(batch: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, ROWS, (batch, FIELDS), dtype=dtype)


@pytest.mark.parametrize(
    "make", [Dots, Stacked, Whole, FieldAware, Sums, OneByOne, ReadBefore, Totals, TotalOfDots, OverPairs]
)
@torch.no_grad()
def test_gives_eagers_numbers(make: type[Dots]) -> None:
    model = make().eval()
    fast = fxopt.optimize(model, (ids_of(6),), CONFIG)
    assert applied(fast, "lookup_products")
    for batch in (0, 1, 2, 7, 300, 1500):
        ids = ids_of(batch)
        torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)
        for table in model.left:
            assert isinstance(table, nn.Embedding)
            table.weight.mul_(1.01)  # nothing is kept of the tables
    narrow = fxopt.optimize(model, (ids_of(6, torch.int32),), CONFIG)
    ids = ids_of(9, torch.int32)
    torch.testing.assert_close(narrow(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [Seen, Doubles, OneForAll])
@torch.no_grad()
def test_leaves_alone(make: type[Dots]) -> None:
    model = make().eval()
    fast = fxopt.optimize(model, (ids_of(6),), CONFIG)
    assert not applied(fast, "lookup_products")
    torch.testing.assert_close(fast(ids_of(0)), model(ids_of(0)))


@torch.no_grad()
def test_verification_sees_other_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    side = lookup_products.side
    wrong = lambda plan, products, name: side(plan, products, name)[:: -1 if name == "right" else 1]  # noqa: E731
    monkeypatch.setattr(lookup_products, "side", wrong)
    model, ids = Dots().eval(), ids_of(6)
    fast = fxopt.optimize(model, (ids,), CONFIG)
    (findings,) = fast._fxopt.findings  # type: ignore[attr-defined]
    assert any(ran.rolled_back for ran in findings.passes if ran.name == "lookup_products")
    torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_bad_ids_raise() -> None:
    model = Dots().eval()
    fast = fxopt.optimize(model, (ids_of(6),), CONFIG)
    ids = ids_of(40)
    ids[31, 3] = ROWS
    with pytest.raises(IndexError, match=rf"id {ROWS} at row 31 is outside table '\w+\.\d+\.weight' with {ROWS} rows"):
        fast(ids)
    assert fast(ids[:30]).shape == (30, 3)


def test_training_keeps_its_rows() -> None:
    model = Dots()
    fast = fxopt.optimize(model, (ids_of(6),), CONFIG)
    assert not applied(fast, "lookup_products")
    ids = ids_of(9)
    torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)
