"""field_index: the same values to the bit, and only where the indices are constants in range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize

LI, LJ = torch.tril_indices(7, 7, -1).tolist()


class Fields(nn.Module):
    """Seven fields, as a stack of seven columns would fix them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7, 1))


class Pairs(Fields):
    def forward(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return torch.bmm(z, z.transpose(1, 2))[:, LI, LJ]


class NegativeFields(Fields):
    def forward(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return z[:, [0, -1, 3, -7, 0]] * z[:, torch.tensor([1, 2, 3, 4, 5])]


class LivePairs(Fields):
    """The triangle in a buffer, as torchrec keeps it; negative indices count from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.tensor([LI, [j - 7 for j in LJ]]))

    def forward(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return torch.bmm(z, z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]


class AnyNumberOfFields(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z[:, [0, 2]] + 1


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor([0, 2]))

    def forward(self, z: Tensor) -> Tensor:
        return z[:, self.index] + 1


def rewrites(model: nn.Module) -> list[str]:
    (findings,) = model._fxopt.findings
    return [change.what for ran in findings.passes if ran.name == "field_index" for change in ran.changes]


@pytest.mark.parametrize(
    ("model", "count"), [(Pairs(), 1), (NegativeFields(), 2), (LivePairs(), 1), (Buffer(), 0), (AnyNumberOfFields(), 1)]
)
def test_values_and_gradients_are_eagers(model: nn.Module, count: int) -> None:
    fast = optimize(model, (torch.randn(5, 7, 4),))
    assert len(rewrites(fast)) == count
    for batch in (0, 1, 3, 64):
        z = torch.randn(batch, 7, 4, requires_grad=True)
        assert torch.equal(fast(z), model(z))
        weight = torch.randn_like(model(z))
        (expected,), (found,) = (torch.autograd.grad((m(z) * weight).sum(), z) for m in (model, fast))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_every_number_of_fields_has_a_capture() -> None:
    model = AnyNumberOfFields()
    fast = optimize(model, (torch.randn(5, 7, 4),))
    for fields in (7, 3, 5):
        z = torch.randn(4, fields, 4)
        assert torch.equal(fast(z), model(z))
    with pytest.raises(IndexError):
        fast(torch.randn(4, 2, 4))


def test_an_index_out_of_range_raises_as_eager_does() -> None:
    class Outside(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z[:, [0, 7]]

    fast = optimize(Outside())
    with pytest.raises(IndexError):
        fast(torch.randn(2, 7, 4))


def test_live_indices_may_change() -> None:
    model = LivePairs()
    z = torch.randn(40, 7, 4)
    fast = optimize(model, (z,))
    assert torch.equal(fast(z), model(z))
    for pairs in ([[1, 2, 2], [0, 0, 1]], [[-1], [6]], [[], []]):
        model.pairs = torch.tensor(pairs, dtype=torch.int64)
        assert torch.equal(fast(z), model(z))
    model.pairs = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(fast(z), model(z))
    model.pairs[0, 1] = 5
    assert torch.equal(fast(z), model(z))
    model.pairs[0, 1] = 7
    with pytest.raises(IndexError):
        fast(z)


class Masked(Fields):
    """Fields by masks in buffers, as FuxiCTR keeps them; `how` is what it does with them."""

    def __init__(self, how: Callable[[Masked, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("pairs", torch.triu(torch.ones(7, 7), 1).byte())
        self.register_buffer("some", torch.tensor([1, 0, 0, 1, 1, 0, 1]).bool())

    def forward(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return self.how(self, z)


def gram(z: Tensor) -> Tensor:
    return torch.bmm(z, z.transpose(1, 2))


MASKED = {
    "triangle": lambda m, z: torch.masked_select(gram(z), m.pairs.bool()).view(-1, 21),
    "triangle by index": lambda m, z: gram(z)[:, m.pairs > 0],
    "made in forward": lambda m, z: gram(z).masked_select(torch.ones(7, 7).tril(-1).bool()).view(-1, 21),
    "fields": lambda m, z: torch.masked_select(z, m.some.view(1, 7, 1)).view(-1, 4, z.shape[2]),
    "fields by index": lambda m, z: z[:, m.some],
    "pairs of vectors": lambda m, z: z.unsqueeze(2).expand(-1, -1, 7, -1)[:, m.pairs.bool()],
    "over lanes": lambda m, z: torch.masked_select(
        (z.unsqueeze(2) + z.unsqueeze(1)).tanh(), m.pairs.t().unsqueeze(-1).bool()
    ).view(-1, 21, z.shape[2]),
    "expanded between": lambda m, z: torch.masked_select(
        gram(z).unsqueeze(2) + m.scale[:2], m.some.view(7, 1, 1) & m.some.roll(1)
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_in_buffers_are_lists_of_fields(name: str) -> None:
    model = Masked(MASKED[name])
    fast = optimize(model, (torch.randn(5, 7, 3),), Config(verify="full"))
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert sum(len(ran.changes) for ran in found.passes if ran.name == "masked_fields") == 1
    assert not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    for rows in (0, 1, 4, 33):
        z = torch.randn(rows, 7, 3)
        torch.testing.assert_close(fast(z), model(z))
    assert len(fast._fxopt.entries) == 1  # type: ignore[union-attr, arg-type]


def test_a_mask_that_changes_is_read_again() -> None:
    model, z = Masked(MASKED["fields by index"]), torch.randn(5, 7, 3)
    fast = optimize(model, (z,))
    model.some.data = model.some.roll(1)  # another list of as many
    torch.testing.assert_close(fast(z), model(z))
    model.some[:] = True  # more than the graph was made for
    assert fast(z).shape == (5, 7, 3)
    torch.testing.assert_close(fast(z), model(z))
