"""A call that fails has the effects that eager has until it fails, once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt import Config
from fxopt.runtime import dispatcher_of, undo
from fxopt.torch_internals.seeds import seed_started


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.layer, self.norm = nn.Embedding(5, 3), nn.Linear(3, 2), nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))
        self.last: Any = None

    def answer(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x + self.table(ids))


class EditsAll(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total += 1
        x.mul_(2)
        self.last = x.shape[1]
        return self.answer(x * self.total, ids)


class CountsAndTakesALogarithm(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total += 1
        return x.sum(1) * math.log(x.shape[1]) + self.total[0]


class CountsAndDivides(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total += 1
        return x.sum(1) * (6 // x.shape[1]) + self.total[0]


@pytest.mark.parametrize("kind", [CountsAndTakesALogarithm, CountsAndDivides])
def test_a_number_that_is_none_is_an_error_of_a_call_that_counts_once(kind: type[Base]) -> None:
    model = kind().eval()
    fast = fxopt.optimize(model, config=Config(tune="off"))
    with torch.no_grad():
        for length in (8, 9):
            fast(torch.rand(2, length), None)
        with pytest.raises((ValueError, ZeroDivisionError)):
            fast(torch.rand(2, 0), None)
    assert model.total.tolist() == [3.0] * 3


class Statistics(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(self.norm(x), ids)


class Reassigns(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total = self.total + 1
        return self.answer(x * self.total, ids)


class Draws(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(torch.dropout(x, 0.5, True), ids)


class Asserts(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total += 1
        torch._assert(((ids >= 0) & (ids < 5)).all(), "a bad id")
        return self.layer(x * self.total)


class Late(Base):
    """Nothing can fail behind the edit."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found = self.table(ids)
        self.total += 1
        return self.layer(x * self.total + found)


class Scatters(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.total.index_add_(0, ids.clamp(max=2), torch.ones(ids.shape[0]))
        return self.answer(x * self.total, ids)


class EditsWeights(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
            self.table.weight[0].zero_()
        return self.answer(x, ids)


class EditsIds(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ids += 1
        return self.answer(x, ids)


class EditsView(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x[:, 1:].add_(self.total[1:])
        self.total[:2].add_(1)
        return self.answer(x, ids)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.rows, self.seen = 0, [0], {"last": [0.0]}
        self.register_buffer("total", torch.zeros(()))
        self.plain = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > -1e9:
            self.calls += 1
        self.rows.append(self.calls)
        self.seen["last"].append(1.0)
        self.total += 1
        self.plain.add_(1)
        return x + self.total + self.plain


class Opaque(Base):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(self.leaf(x), ids)


class OpaqueAndStores(Opaque):
    """The graph assigns what the layer does not change."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.last = x.shape[1]
        return super().forward(x, ids)


class Large(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(undo.MOST // 4 + 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.large += 1
        return self.answer(x, ids) + self.large[:2]


MODELS = [
    EditsAll, Statistics, Reassigns, Draws, Asserts, Late, Scatters, EditsWeights, EditsIds, EditsView, Opaque,
    OpaqueAndStores, Large,
]  # fmt: skip
IDS = ([0, 1, 2, 3], [0, 1, 9, 3], [1, 1, 1, 1], [-3, 0, 0, 0], [2, 2, 2, 2])


def outcome(model: nn.Module, x: Tensor, ids: Tensor, seed: int) -> Any:
    seed_started(seed)
    try:
        return model(x, ids)
    except (IndexError, AssertionError, RuntimeError) as error:
        return type(error).__name__


def plain(model: nn.Module) -> tuple:
    leaf = getattr(model, "leaf", None)
    return model.last, leaf and (leaf.calls, leaf.rows, leaf.seen, leaf.plain.tolist())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("level", ["full", "off"])
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_failing_calls(kind, prepared, level, grad):
    model, twin = kind(), kind()
    example = (torch.randn(4, 3), torch.tensor([0, 1, 2, 3])) if prepared else None
    with torch.set_grad_enabled(grad):
        fast = fxopt.optimize(model, example, Config(verify=level, tune="off"))
        failed = 0
        for number, ids in enumerate(IDS):
            given = torch.randn(4, 3), torch.tensor(ids)
            copies = [tensor.clone() for tensor in given]
            expected = outcome(twin, *copies, number)
            drawn = torch.get_rng_state()
            found = outcome(fast, *given, number)
            assert torch.equal(torch.get_rng_state(), drawn)
            if isinstance(expected, str):
                failed += 1
                assert found == expected
            else:
                torch.testing.assert_close(found, expected)
            assert all(map(torch.equal, given, copies))
            assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
            assert plain(model) == plain(twin)
    assert failed == 2
    (entry,) = dispatcher_of(fast).entries
    assert (entry.executable is None) == (kind is Large)
    if kind is Large:
        assert "large" in entry.findings.eager_reason


class StartsAgain(nn.Module):
    """It makes itself again for some data, and so assigns what otherwise only its making assigns."""

    def __init__(self, made: int = 0) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            self.__init__(self.made + 1)  # type: ignore[misc]
        return x * self.made


def test_a_layer_that_makes_itself_again_in_a_call_that_fails():
    model = Opaque()
    model.leaf = StartsAgain()
    x, ids = torch.ones(4, 3), torch.tensor(IDS[0])
    fast = fxopt.optimize(model, (-x, ids), Config(tune="off"))
    fast(-x, ids)
    with pytest.raises(IndexError):
        fast(x, ids + 9)
    assert model.leaf.made == 1


def test_what_eager_raises_for_is_undone_to_the_version():
    """A failing call counts as many versions as eager's."""
    model, twin = Asserts(), Asserts()
    fast = fxopt.optimize(model, config=Config(tune="off"))
    for ids in IDS[:2]:
        for net in (fast, twin):
            outcome(net, torch.ones(4, 3), torch.tensor(ids), 0)
    assert model.total._version == twin.total._version == 2


SIZED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "the largest of none": lambda m, x, y: x.amax(1),
    "a window": lambda m, x, y: torch.max_pool1d(x.mT, 3),
    "an index": lambda m, x, y: x[:, 4],
    "a row": lambda m, x, y: x.select(1, 2),
    "the last row": lambda m, x, y: x.select(1, -1),
    "a window of rows": lambda m, x, y: torch.max_pool1d(x, 2),
    "a part": lambda m, x, y: x.narrow(1, 2, 3),
    "groups": lambda m, x, y: x.unflatten(1, (-1, 3)),
    "reflected": lambda m, x, y: F.pad(x.mT, (3, 3), mode="reflect"),
    "one value a channel": lambda m, x, y: F.batch_norm(x.mT, None, None, training=True),
    "expanded": lambda m, x, y: y.expand_as(x),
    "side by side": lambda m, x, y: torch.cat([x, y], 2),
    "a product": lambda m, x, y: x.mT @ y,
    "flat": lambda m, x, y: F.linear(x.flatten(1), torch.ones(2, 24)),
    "sizes that shrink": lambda m, x, y: x.new_full((x.shape[0], x.shape[1] - 3), 1.0),
}
LENGTHS = ((6, 6, 4), (3, 3, 4), (0, 0, 4), (1, 1, 1), (2, 2, 3), (6, 1, 4), (6, 5, 4), (1, 6, 4), (6, 6, 0))


class Counts(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.total.add_(1)
        return self.run(self, x, y) * 2


@torch.no_grad()
@pytest.mark.parametrize("name", SIZED)
def test_what_sizes_make_fail_is_counted_once(name: str) -> None:
    """Whatever the graph takes for certain, of sizes that it was not captured with."""
    eager, own = Counts(SIZED[name]), Counts(SIZED[name])
    fast, failed = fxopt.optimize(own, None, Config(tune="off", verify="off")), 0
    for length, other, batch in LENGTHS:
        x, y = torch.randn(batch, length, 4), torch.randn(batch, other, 4)
        outcomes: list[Any] = []
        for model in (eager, fast):
            try:
                outcomes.append(model(x, y))
            except Exception as error:
                outcomes.append(type(error))
        failed += isinstance(outcomes[0], type)
        torch.testing.assert_close(outcomes[1], outcomes[0]) if isinstance(outcomes[0], Tensor) else None
        assert isinstance(outcomes[0], Tensor) or outcomes[1] is outcomes[0]
        assert torch.equal(own.total, eager.total)
    assert failed and not any(findings.eager_reason for findings in fast._fxopt.findings)


LOG: list[tuple[int, ...]] = []


class Logged(Base):
    """A layer whose hook writes to a list of the user's, in front of a lookup."""

    def __init__(self, show: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.first.register_forward_hook(lambda layer, given, y: print("ran") if show else LOG.append(tuple(y.shape)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(self.first(x).relu(), ids)


@torch.no_grad()
@pytest.mark.parametrize("show", [False, True])
def test_hooks_run_once_in_a_call_that_fails(show: bool, capsys: pytest.CaptureFixture) -> None:
    eager = Logged(show)
    fast = fxopt.optimize(Logged(show), config=Config(verify="off", tune="off"))
    for ids in ([1, 2], [1, 7], [0, 3]):
        ran = []
        for model in (eager, fast):
            LOG.clear()
            capsys.readouterr()
            with contextlib.suppress(IndexError):
                model(torch.randn(2, 3), torch.tensor(ids))
            ran.append((list(LOG), capsys.readouterr().out))
        assert ran[0] == ran[1]


@torch.no_grad()
def test_hooks_around_every_forward_run_in_each_call() -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, y: seen.append(type(module).__name__))
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        fast = fxopt.optimize(model)
        for _ in range(3):
            seen.clear()
            fast(torch.randn(2, 3))
            assert seen[:2] == ["Linear", "ReLU"] and len(seen) == 3
    finally:
        handle.remove()
