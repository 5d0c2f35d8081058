"""field_index: the same values to the bit, and only where the indices are constants in range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxopt import optimize

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
