"""On a GPU, a lookup out of its table ends the process: what is made up there is computed and looked at first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of
from fxopt.verify.examples import Examples
from fxopt.verify.witness import Witnesses


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.EmbeddingBag(50, 4), nn.EmbeddingBag(3, 4)

    def forward(self, ids: Tensor, offsets: Tensor, others: Tensor, starts: Tensor) -> Tensor:
        return self.a(ids, offsets) + self.b(others, starts)


class Halves(nn.Module):
    """Ids of two tables side by side: what is good in the first half is not in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.randn(50, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        first, second = ids[: x.shape[0]] * 1, ids[x.shape[0] :] * 1
        return torch.cat([F.embedding(first, self.wide), F.embedding(second, self.narrow)]).sum(0) + x.sum()


class Picked(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[ids] + x.index_select(0, ids)


BAGS = (torch.randint(0, 50, (9,)), torch.tensor([0, 2, 5, 9]), torch.randint(0, 3, (4,)), torch.tensor([0, 1, 1, 3]))
HALVES = (torch.tensor([40, 41, 42, 0, 1, 2]), torch.randn(3, 3))
PICKED = (torch.randn(4, 4), torch.tensor([3, 0, 1, 2]))


@pytest.mark.parametrize(("model", "inputs"), [(Bags(), BAGS), (Halves(), HALVES), (Picked(), PICKED)])
def test_eager_gets_no_bad_id(model: nn.Module, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    errors, compared = [], Examples._compared

    def spied(self: Examples, where: str, given: list[Tensor]) -> object:
        comparison = compared(self, where, given)
        errors.append(comparison.eager.error)
        return comparison

    monkeypatch.setattr(Examples, "_compared", spied)
    monkeypatch.setattr(Witnesses, "_on_cuda", property(lambda self: True))
    with torch.no_grad():
        fast = fxopt.optimize(model, inputs)
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert errors and not any(isinstance(error, (IndexError, RuntimeError)) for error in errors)
    (entry,) = dispatcher_of(fast).entries
    assert entry.findings.witness or entry.findings.untold
    assert entry.findings.witness or not isinstance(model, Bags)
