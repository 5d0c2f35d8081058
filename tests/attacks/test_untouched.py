"""What functions keep between calls: a look takes nothing from it, and leaves nothing in it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.optimize import optimize
from tests.attacks.attack import CONFIGS, _same
from tests.attacks.seen_code import Runs


def enclosing() -> Callable:
    calls, known = 0, {}

    def run(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls + known.setdefault("ones", torch.ones(4))

    return run


def with_default() -> Callable:
    def run(model: nn.Module, x: Tensor, known: list = []) -> Tensor:  # noqa: B006
        known.append(len(known) + 1.0)
        return x * known[-1]

    return run


def with_attribute() -> Callable:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        run.calls = getattr(run, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * run.calls  # type: ignore[attr-defined]

    return run


def cached() -> Callable:
    @functools.lru_cache
    def positions(n: int) -> Tensor:
        return torch.arange(n)

    return lambda model, x: x + positions(4)


def counted() -> Callable:
    numbers = itertools.count(1)
    return lambda model, x: x * next(numbers)


LAST: Any = None


def in_global() -> Callable:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        global LAST
        LAST = x * 2
        return LAST

    return run


class Odd:
    """What says how it is copied is shared by copies of a model."""

    calls = 0

    def __getstate__(self) -> dict:
        return vars(self)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def generated():
    value = 1.0
    while True:
        yield value
        value *= 0.5


def to_parent(model: Any, x: Tensor) -> Tensor:
    model.held.steps = getattr(model.held, "steps", 0) + 1
    return x * model.held.steps


def with_parent() -> nn.Module:
    model = Runs(to_parent)
    model.held = weakref.proxy(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "closure": lambda: Runs(enclosing()),
    "default": lambda: Runs(with_default()),
    "function_attribute": lambda: Runs(with_attribute()),
    "cache": lambda: Runs(cached()),
    "enclosed_iterator": lambda: Runs(counted()),
    "global": lambda: Runs(in_global()),
    "shared_object": lambda: Runs(lambda m, x: m.held(x), Odd()),
    "iterator": lambda: Runs(lambda m, x: x * next(m.held), itertools.count(1)),
    "generator": lambda: Runs(lambda m, x: x * next(m.held), generated()),
    "proxy": with_parent,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_as_if_nobody_had_looked(make: Callable[[], nn.Module], ahead: bool, config) -> None:
    eager, fast = make(), optimize(make(), config=config)
    if ahead:
        fast._fxopt.prepare((torch.ones(3, 4),), {})  # type: ignore[union-attr, operator]
    for size in (3, 3, 5):
        x = torch.ones(size, 4)
        _same("result", eager(x), fast(x))
    assert LAST is None or type(LAST) is Tensor
