"""Offsets that are added to the ids of fields, with views in front and behind: whatever the shapes, eager's rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.patterns.found import executable

View = Callable[[Tensor, int], Tensor]  # of ids and the batch
VIEWS: dict[str, View] = {
    "flat": lambda x, b: x.reshape(-1, x.shape[-1]),
    "a row of ids": lambda x, b: x.reshape(b, -1),
    "apart": lambda x, b: x.reshape(b, -1, x.shape[-1]),
    "one in front": lambda x, b: x.unsqueeze(1),
    "one behind": lambda x, b: x.unsqueeze(-1),
    "without ones": lambda x, b: x.squeeze(-1) if x.dim() > 2 else x,
    "turned": lambda x, b: x.transpose(1, -1) if x.dim() > 2 else x,
    "cut": lambda x, b: x[..., 1:] if x.dim() > 1 and x.shape[-1] > 1 else x,
    "one of them": lambda x, b: x[..., 0] if x.dim() > 2 else x,
    "repeated": lambda x, b: x.unsqueeze(-1).expand(*x.shape, 2),
    "repeated where it is one": lambda x, b: x.expand(*x.shape[:-1], 3) if x.shape[-1] == 1 else x,
}
OFTEN = ("flat", "flat", "flat", "apart")  # joined with the sequence and taken apart, as libraries write it


class Fields(nn.Module):
    """Lookups in two tables of F ids for each entry of a sequence [B, L], behind views, offsets and views.

    offsets: one for every entry of the last dim of what they are added to, or a single one.
    """

    def __init__(
        self, fields: int, before: Sequence[str], offsets: Tensor, constant: bool, ones: int, behind: Sequence[str]
    ) -> None:
        super().__init__()
        self.before, self.behind, self.ones = before, behind, ones
        self.values = offsets.tolist() if constant else None
        self.register_buffer("offsets", offsets)
        self.register_buffer("ids", torch.randint(0, 4, (50, fields)))
        self.table, self.other = nn.Embedding(60, 3), nn.Embedding(4, 3)

    def forward(self, sequence: Tensor) -> Tensor:
        offsets = self.offsets if self.values is None else torch.tensor(self.values)
        offsets = offsets.view((1,) * self.ones + offsets.shape)
        value = viewed(viewed(self.ids[sequence], self.before) + offsets, self.behind, sequence.shape[0])
        return torch.cat([self.table(value), self.other(value % 4)], -1)


def viewed(value: Tensor, views: Sequence[str], batch: int | None = None) -> Tensor:
    batch = value.shape[0] if batch is None else batch
    for name in views:
        value = VIEWS[name](value, batch)
    return value


def some_model(chosen: random.Random) -> Fields:
    fields, ones = chosen.choice([1, 3]), chosen.randrange(2)
    before, behind = (chosen.choices([*VIEWS, *OFTEN], k=chosen.randrange(3)) for _ in range(2))
    last = viewed(torch.zeros(5, 7, fields), before).shape[-1]
    offsets = (4 * torch.arange(chosen.choice([1, last])) + chosen.randrange(4)) % 56
    return Fields(fields, before, offsets, chosen.random() < 0.5, ones, behind)


@pytest.mark.parametrize("seed", range(60))
def test_any_views_around_offsets(seed: int) -> None:
    torch.manual_seed(seed)
    check(some_model(random.Random(seed)))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("ones", [0, 1])
@pytest.mark.parametrize("behind", [(), ("apart",), ("without ones",)])
@pytest.mark.parametrize("before", [(), ("flat",), ("flat", "a row of ids"), ("one in front",)])
def test_one_field(before: Sequence[str], behind: Sequence[str], ones: int, constant: bool) -> None:
    check(Fields(1, before, torch.tensor([7]), constant, ones, behind))


def check(model: Fields) -> None:
    made = executable(model, (torch.randint(0, 50, (5, 7)),))
    assert not [ran.rolled_back for ran in made.findings.passes if ran.rolled_back]
    state = [getattr(model.get_submodule(slot.module), slot.name) for slot in made.capture.state]
    for size in ((5, 7), (4, 7)):
        sequence = torch.randint(0, 50, size)
        with torch.no_grad():
            (found,) = made.run(*state, sequence)
            assert torch.equal(found, model(sequence))


class Fixed(nn.Module):
    """Ids [2, 3] of the model's own, whose 6 offsets run over both dims."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(60, 3), nn.Embedding(60, 3)
        self.register_buffer("ids", torch.randint(0, 4, (2, 3)))
        self.register_buffer("offsets", 4 * torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        ids = self.ids.reshape(6) + self.offsets
        return torch.cat([self.table(ids), self.other(ids + 1)], 1).mm(x)


def test_offsets_of_two_dims() -> None:
    model, x = Fixed(), torch.randn(6, 4)
    made = executable(model, (x,))
    state = [getattr(model.get_submodule(slot.module), slot.name) for slot in made.capture.state]
    with torch.no_grad():
        assert torch.equal(made.run(*state, x)[0], model(x))
