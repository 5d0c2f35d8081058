"""autocast around and inside a model: the casts are in the graph, and the answers are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of

DTYPES = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Lookups, layers, a product inside einsum, and operators that autocast runs in float32 or promotes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(40, 8, mode="mean"), nn.Embedding(40, 8)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.bag(ids), self.table(ids[:, 0])], 1)
        scores = self.layers(x)
        own = torch.einsum("bd,bd->b", x, x).unsqueeze(1)
        return scores.softmax(1), F.mse_loss(scores, own.expand_as(scores)) + torch.cat([scores, x], 1).sum()


class Regions(nn.Module):
    """autocast inside, off inside of it, and again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids[:, 0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                z = self.second(y.float())
            w = self.first(z)
        return self.second(w.float()), y


class Halves(nn.Module):
    """A submodule that no graph can hold, beside what autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.branch = nn.Embedding(40, 8), nn.Linear(8, 8), Branch()

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.branch(self.layer(self.table(ids[:, 0]))))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.float().sum()) > -1e9 else x


class Composed(nn.Module):
    """Operators that autocast casts in the middle of, and a recurrent layer, which stays opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(40, 8), nn.ModuleList([nn.GRUCell(8, 8), nn.RNNCell(8, 8)])
        self.lstm, self.recurrent, self.square = nn.LSTMCell(8, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x, weight = self.table(ids[:, 0]), self.square.weight
        products = [torch.linalg.multi_dot([x, weight, weight]), x @ torch.linalg.matrix_power(weight, 3)]
        products.append(torch.matrix_power(weight, 2))
        states, _ = self.recurrent(self.table(ids))
        return [*(cell(x) for cell in self.cells), self.lstm(x)[0], *products, self.square(states[:, -1]).relu()]


def two(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = kind()
    model = copy.deepcopy(eager)
    return eager, model, fxopt.optimize(model)


def outputs(model: nn.Module, ids: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found = model(ids)
    return [found] if isinstance(found, Tensor) else list(found)


def compare(mine: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-2) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)  # dtypes, too


def captured(model: nn.Module) -> bool:
    return all(not found.eager_reason for found in dispatcher_of(model).findings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Net, Regions, Halves, Composed])
def test_outputs_and_gradients_are_eagers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    eager, model, optimized = two(kind)
    for rows in (6, 1, 0, 33):
        ids = torch.randint(0, 40, (rows, 3))
        results = [outputs(each, ids, dtype) for each in (optimized, eager)]
        compare(*results)
        if rows:
            for found in results:
                sum(t.float().square().sum() for t in found).backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        size = theirs.grad.abs().max().clamp(min=1e-9)  # what a sum rounds off depends on its largest part
        torch.testing.assert_close(mine.grad / size, theirs.grad / size, rtol=0, atol=3e-2)
    assert captured(optimized) and not torch.is_autocast_enabled("cpu")


def test_an_inverse_that_casts_within_stays_eager() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.pinv(x)

    model, x = Inverse(), torch.randn(5, 4)
    optimized = fxopt.optimize(model)
    for _ in range(3):
        compare(outputs(optimized, x, torch.bfloat16), outputs(model, x, torch.bfloat16))
    assert "casts within it" in dispatcher_of(optimized).findings[0].eager_reason


def test_each_setting_has_a_capture_of_its_own() -> None:
    eager, _, optimized = two(Net)
    ids = torch.randint(0, 40, (6, 3))
    for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.no_grad():
            compare(outputs(optimized, ids, dtype), outputs(eager, ids, dtype), 1e-5 if dtype is None else 2e-2)
    assert captured(optimized) and len(dispatcher_of(optimized).entries) == 3


def test_training_with_a_scaler() -> None:
    eager, model, optimized = two(Net)
    losses = []
    for each in (eager, optimized):
        torch.manual_seed(1)
        optimizer, scaler = torch.optim.SGD(each.parameters(), lr=0.02), torch.amp.GradScaler("cpu", init_scale=128.0)
        for step in range(6):
            with torch.autocast("cpu", dtype=torch.float16):
                scores, _ = each(torch.randint(0, 40, (16, 3)))
                loss = -scores.float()[:, 0].log().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append((float(loss.detach()), scaler.get_scale()))
    torch.testing.assert_close(torch.tensor(losses[:6]), torch.tensor(losses[6:]), rtol=2e-2, atol=1e-3)
    compare(list(model.parameters()), list(eager.parameters()), 5e-3)
    assert captured(optimized)


def test_an_error_inside_leaves_autocast_as_it_was() -> None:
    class Fails(Regions):
        def forward(self, ids: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.first(self.table(ids)) + float(ids.sum())

    _, _, optimized = two(Fails)
    ids = torch.randint(0, 40, (6,))
    for _ in range(2):
        optimized(ids)
        assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(IndexError):
            optimized(ids + 40)
        assert not torch.is_autocast_enabled("cpu")


@torch.autocast("cuda", enabled=False)
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Decorated(nn.Module):
    """Regions of autocast that are decorators: of a function, and of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = doubled(self.first(x))
        return self.last(x)


@pytest.mark.parametrize("outside", [False, True])
def test_decorators(outside: bool) -> None:
    """Entering one for the first time leaves attributes on it, which are no state of the model's."""
    model = Decorated()
    fast = fxopt.optimize(copy.deepcopy(model))
    for batch in (5, 1, 3):
        x = torch.randn(batch, 4)
        with torch.autocast("cpu", dtype=torch.float16, enabled=outside):
            ours, eager = fast(x), model(x)
        torch.testing.assert_close(ours, eager)
        ours.sum().backward(), eager.sum().backward()
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)
    for own, other in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
