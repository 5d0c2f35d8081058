"""Small tensors that a module holds as attributes: what their numbers decide is taken for granted, and asked again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Config
from fxopt.runtime import dispatcher_of


class Picked(nn.Module):
    """x [B, 6], of which a mask tells ids from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_id = torch.tensor([True, False, False, True, False, True])
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(6))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def joined(self, numbers: Tensor, ids: list[Tensor]) -> Tensor:
        found = torch.cat([numbers, *(table(i.long()) for table, i in zip(self.tables, ids, strict=False))], 1)
        return found.tanh() * found.shape[1]


class ByIndex(Picked):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x[:, ~self.is_id], list(x[:, self.is_id].unbind(1)))


class ByLoop(Picked):
    def forward(self, x: Tensor) -> Tensor:
        ids = [x[:, place] for place, is_id in enumerate(self.is_id) if is_id]
        return self.joined(x[:, torch.logical_not(self.is_id)], ids)


class ByCount(Picked):
    def forward(self, x: Tensor) -> Tensor:
        count = self.is_id.sum().item()
        return self.joined(x[:, count:], [x[:, place] for place in range(count)])


class ByGrid(Picked):
    def __init__(self) -> None:
        super().__init__()
        self.grid = torch.tensor([[True, False, True], [True, True, False]])

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x.view(-1, 2, 3)[:, self.grid], list(x[:, self.is_id].unbind(1)))


MODELS = [ByIndex, ByLoop, ByCount, ByGrid]


def rows(batch: int) -> Tensor:
    return torch.randint(0, 9, (batch, 6)).float()


def agrees(fast: nn.Module, model: Picked) -> None:
    for batch in (1, 7, 32, 64):
        x = rows(batch)
        want, got = model(x), fast(x)
        torch.testing.assert_close(got, want)
        if want.requires_grad:
            gradients = [
                torch.autograd.grad(out.square().sum(), list(model.tables.parameters()), allow_unused=True)
                for out in (want, got)
            ]
            for expected, found in zip(*gradients, strict=True):
                assert (expected is None) == (found is None)
                if expected is not None:
                    torch.testing.assert_close(found, expected)


def served(fast: nn.Module) -> list[str]:
    return [entry.findings.eager_reason for entry in dispatcher_of(fast).entries]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_masks_decide_how_many_columns_there_are(kind: type[Picked], training: bool) -> None:
    model = kind().train(training)
    with torch.set_grad_enabled(training):
        fast = fxopt.optimize(model, (rows(9),), Config(tune="off"))
        agrees(fast, model)
    assert served(fast) == [""]


def edit(model: Picked) -> None:
    model.is_id[3] = False


def edit_data(model: Picked) -> None:
    model.is_id.data[1] = True


def edit_as_array(model: Picked) -> None:
    model.is_id.numpy()[2] = True


def replace(model: Picked) -> None:
    model.is_id = torch.tensor([False, True, False, True, False, False])


@pytest.mark.parametrize("change", [edit, edit_data, edit_as_array, replace])
@pytest.mark.parametrize("kind", MODELS)
def test_the_next_call_sees_other_numbers(kind: type[Picked], change) -> None:
    model = kind().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, (rows(9),), Config(tune="off"))
        agrees(fast, model)
        change(model)
        agrees(fast, model)
    assert set(served(fast)) == {""}


class Longer(Picked):
    """A mask over rows, or one that does not fit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mask = torch.arange(size) % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.mask].sum(1) if len(self.mask) != 9 else x[self.mask].sum(1)


@torch.no_grad()
def test_masks_that_do_not_fit_are_eagers() -> None:
    model = Longer(9).eval()
    fast = fxopt.optimize(model, (rows(9),), Config(tune="off"))
    torch.testing.assert_close(fast(x := rows(9)), model(x))
    with pytest.raises(IndexError, match="does not match the shape"):
        fast(rows(8))
    with pytest.raises(IndexError, match="does not match the shape"):
        fxopt.optimize(Longer(7).eval(), (rows(9),), Config(tune="off"))(rows(9))


class Counted(Picked):
    """A mask that the forward itself makes, and then edits."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.is_id.clone()
        mask[1] = x[0, 0] > 4
        return x[:, mask].sum(1)


@torch.no_grad()
def test_masks_that_data_decide() -> None:
    model = Counted().eval()
    fast = fxopt.optimize(model, (rows(9),), Config(tune="off"))
    for _ in range(9):
        torch.testing.assert_close(fast(x := rows(7)), model(x))


class Editor(nn.Module):
    """Stays opaque, and edits a mask that it holds or is given."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        mask[1] = bool(x.sum() > 0)
        return x + 1


class Edited(Picked):
    def __init__(self, held: bool) -> None:
        super().__init__()
        self.editor = Editor(self.is_id if held else None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.editor(x) if self.editor.mask is not None else self.editor(x, self.is_id[:3])
        return x[:, self.is_id] * 2


@pytest.mark.parametrize("held", [True, False])
@torch.no_grad()
def test_masks_that_a_leaf_edits(held: bool) -> None:
    model = Edited(held).eval()
    fast = fxopt.optimize(model, (-rows(9),), Config(tune="off"))
    for sign in (1, -1, -1, 1, 1):
        got = fast(x := sign * (rows(7) + 1))
        torch.testing.assert_close(got, model(x))
