"""Repairs of empty bags go where embedding_bag itself gives zeros; those that change something stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from tests.rewrites.dead import ALONE, same_bits

WHAT = "the repair of empty bags removed"

REPAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "where_zeros": lambda bag, n: torch.where((n == 0).unsqueeze(1), torch.zeros_like(bag), bag),
    "where_zero": lambda bag, n: torch.where(n[:, None] == 0, 0.0, bag),
    "where_full": lambda bag, n: torch.where((n != 0).view(-1, 1), bag, 0.0),
    "where_not": lambda bag, n: torch.where(~(n == 0).unsqueeze(-1).expand_as(bag), bag, torch.zeros_like(bag)),
    "masked_fill": lambda bag, n: bag.masked_fill((n == 0).unsqueeze(1), 0.0),
    "mask_times": lambda bag, n: bag * (n != 0).unsqueeze(1).float(),
    "mask_then_column": lambda bag, n: bag * (n != 0).float().unsqueeze(1),
    "mask_of_floats": lambda bag, n: bag.masked_fill(n.float().unsqueeze(1) == 0, 0),
}
STAY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ones": lambda bag, n: bag.masked_fill((n == 0).unsqueeze(1), 1.0),
    "minus_zero": lambda bag, n: bag.masked_fill((n == 0).unsqueeze(1), -0.0),
    "bags_of_one": lambda bag, n: bag.masked_fill((n == 1).unsqueeze(1), 0.0),
    "at_most_one": lambda bag, n: bag.masked_fill((n <= 1).unsqueeze(1), 0.0),
    "full": lambda bag, n: bag.masked_fill((n != 0).unsqueeze(1), 0.0),
    "another_count": lambda bag, n: bag.masked_fill((n - 1 == 0).unsqueeze(1), 0.0),
    "the_wrong_axis": lambda bag, n: bag.masked_fill((n.sum() * n.new_ones(8) == 0), 0.0),
    "counts_that_wrap": lambda bag, n: bag.masked_fill((n.to(torch.int8) == 0).unsqueeze(1), 0.0),
    "times_the_count": lambda bag, n: bag * n.unsqueeze(1).float(),
    "flipped": lambda bag, n: bag.masked_fill((n.flip(0) == 0).unsqueeze(1), 0.0),
}


class Bags(nn.Module):
    """A pooled lookup with its empty bags repaired; `counted` gives the counts of ids."""

    def __init__(self, mode: str, repair: Callable[[Tensor, Tensor], Tensor], spelling: str = "diff") -> None:
        super().__init__()
        padding = 0 if spelling == "padded" else None
        last = spelling not in ("padded", "append")
        self.bag = nn.EmbeddingBag(50, 8, mode=mode, include_last_offset=last, padding_idx=padding)
        nn.init.normal_(self.bag.weight)
        self.repair, self.spelling = repair, spelling

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        spelling = self.spelling
        if spelling == "padded":
            rows = values.view(-1, 4)
            return self.repair(self.bag(rows), (rows != 0).sum(1))
        if spelling == "append":
            starts = offsets[:-1] * 1
            count = torch.diff(starts, append=torch.full((1,), values.shape[0]))
            return self.repair(self.bag(values, starts), count)
        if spelling == "lengths":
            lengths = offsets.diff()
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            return self.repair(self.bag(values, starts), lengths)
        count = torch.diff(offsets) if spelling == "diff" else offsets[1:] - offsets[:-1]
        return self.repair(self.bag(values, offsets), count)


def bags(B: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 3, (B,)) * 4
    if B:
        lengths[-1] = 0
    values = torch.randint(0, 50, (int(lengths.sum()),))
    values[: len(values) // 2 // 4 * 4] = 0
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def check(model: Bags) -> list[str]:
    with torch.no_grad():
        for disable in ((), ALONE):
            fast = optimize(model, bags(7), Config(disable=disable))
            for B in (0, 1, 2, 30):
                args = bags(B)
                if model.spelling != "padded" or len(args[0]):
                    same_bits(fast(*args), model(*args))
    (findings,) = fast._fxopt.findings[:1]
    assert not findings.eager_reason
    return [change.what for ran in findings.passes if ran.name == "dead_checks" for change in ran.changes]


@pytest.mark.parametrize("repair", REPAIRS)
def test_a_repair_goes(repair: str) -> None:
    assert WHAT in check(Bags("sum", REPAIRS[repair]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("spelling", ["diff", "sub", "append", "lengths", "padded"])
def test_every_mode_and_count(mode: str, spelling: str) -> None:
    model = Bags(mode, REPAIRS["masked_fill"], spelling)
    assert WHAT in check(model)
    with torch.no_grad():
        model.bag.weight[3] = float("nan")  # a row that no empty bag reads
    assert WHAT in check(model)


@pytest.mark.parametrize("repair", STAY)
def test_a_repair_stays(repair: str) -> None:
    assert WHAT not in check(Bags("sum", STAY[repair]))


def test_zeros_and_masks_that_are_edited_are_none() -> None:
    def five(bag: Tensor, n: Tensor) -> Tensor:
        zeros = torch.zeros_like(bag)
        zeros[:, 1:].add_(5)
        return torch.where((n == 0).unsqueeze(1), zeros, bag)

    def all_but_one(bag: Tensor, n: Tensor) -> Tensor:
        empty = n == 0
        empty[1:].logical_not_()
        return bag.masked_fill(empty.logical_not().unsqueeze(1), 0.0)

    assert WHAT not in check(Bags("sum", five)) and WHAT not in check(Bags("sum", all_but_one))


def test_a_count_of_another_padding_stays() -> None:
    class Padded(Bags):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            rows = values.view(-1, 4)
            return self.repair(self.bag(rows), (rows != 1).sum(1))

    assert WHAT not in check(Padded("sum", REPAIRS["masked_fill"], "padded"))


def test_counts_of_rows_that_are_no_bags_stay() -> None:
    class Padded(Bags):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            rows = values.view(-1, 4)
            starts = torch.arange(0, rows.shape[0]) * 0  # all ids are in the last bag
            bag = F.embedding_bag(rows.reshape(-1), self.bag.weight, starts, mode="sum", padding_idx=0)
            return self.repair(bag, (rows != 0).sum(1))

    assert WHAT not in check(Padded("sum", REPAIRS["masked_fill"], "padded"))


def test_a_count_kept_as_a_column() -> None:
    class Padded(Bags):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            rows = values.view(-1, 4)
            return self.bag(rows).masked_fill((rows != 0).sum(1, keepdim=True) < 1, 0.0)

    assert WHAT in check(Padded("mean", REPAIRS["masked_fill"], "padded"))


def test_the_last_bag_may_hold_more_than_its_length() -> None:
    """offsets = cumsum - lengths, without a last offset: what follows the last length belongs to the last bag."""

    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            bag = F.embedding_bag(values, self.table.weight, lengths.cumsum(0) - lengths, mode="sum")
            return bag.masked_fill((lengths == 0).unsqueeze(1), 0.0)

    model = Starts()
    args = torch.randint(0, 50, (9,)), torch.tensor([2, 3, 0])
    with torch.no_grad():
        fast = optimize(model, args)
        same_bits(fast(*args), model(*args))
