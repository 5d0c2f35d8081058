"""What Python code of a forward asks, and gets another answer to in a later call."""

from __future__ import annotations

import argparse
import random
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.attacks.attack import Attack
from tests.attacks.sizes import rows


class SelfOrCross(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, q, k):
        return self.l(q) * 2 if q is k else self.l(q) + k


class SameInList(nn.Module):
    def forward(self, xs):
        distinct: list = []
        for x in xs:
            if not any(x is d for d in distinct):
                distinct.append(x)
        return sum(distinct) * len(distinct)


class CachedById(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, q, k):
        cache: dict[int, Any] = {}
        for x in (q, k):
            cache.setdefault(id(x), self.l(x) * (len(cache) + 1))
        return sum(cache.values())


class ArgsWithObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.args = argparse.Namespace(use_relu=True, scale=2.0, table=nn.Linear(2, 2), log=print)

    def forward(self, x):
        return (x.relu() if self.args.use_relu else x) * self.args.scale


@dataclass
class Inner:
    gain: float = 2.0
    names: list = field(default_factory=lambda: ["a"])


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    device: Any = None
    hook: Any = None


class NestedConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Outer(hook=lambda: None)

    def forward(self, x):
        return x * self.config.inner.gain + len(self.config.inner.names)


class Settings:
    """With a property, a class attribute and slots."""

    factor = 2.0
    __slots__ = ("offset", "rest")

    def __init__(self):
        self.offset, self.rest = 1.0, object()

    @property
    def double(self) -> float:
        return self.offset * 2


class SlotsAndProperties(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = Settings()

    def forward(self, x):
        return x * self.settings.factor + self.settings.double


class ClassAttribute(nn.Module):
    gain = 2.0

    def forward(self, x):
        return x * type(self).gain


SWITCH = types.SimpleNamespace(on=True, level=3)
FLAG = True


class ModuleGlobal(nn.Module):
    def forward(self, x):
        return x * 2 if FLAG else x * SWITCH.level


def flip(model: nn.Module) -> None:
    """Both models read the same globals: they change when both have been called."""
    global FLAG
    if hasattr(model, "_fxopt"):
        FLAG, SWITCH.level = not FLAG, SWITCH.level + 1


class DrawsNumpy(nn.Module):
    def forward(self, x):
        return x * 2 if np.random.rand() < 0.5 else x


class OwnNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x):
        return x * float(self.rng.random()) if self.rng.random() < 0.5 else x


class OwnRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(5)

    def forward(self, x):
        return x * 3 if self.rng.random() < 0.5 else x + self.rng.randint(1, 9)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.rng)


class HeldInList(nn.Module):
    def __init__(self):
        super().__init__()
        self.tools = [random.Random(5), {"g": np.random.RandomState(2)}]

    def forward(self, x):
        return x * self.tools[0].random() + self.tools[1]["g"].rand()


class AsksRequiresGrad(nn.Module):
    def forward(self, x):
        return x * 2 if x.requires_grad else x * 3


class AsksNone(nn.Module):
    def forward(self, x, y=None):
        return x if y is None else x + y


class AsksDefaultDtype(nn.Module):
    def forward(self, x):
        return x + torch.ones(4), x * (2 if torch.get_default_dtype() is torch.float32 else 3)


def twins(n: int) -> tuple:
    x = rows(n, 4)
    return x, x


def twice_seeded(model) -> Attack:
    return Attack(model, [lambda n=n: (rows(n, 4),) for n in (3, 3, 5, 2, 2, 3)])


def toggled(name: str, *values: Any):
    def change(model: nn.Module) -> None:
        target, *path = model, *name.split(".")
        for part in path[:-1]:
            target = getattr(target, part)
        now = getattr(target, path[-1])
        setattr(target, path[-1], values[(values.index(now) + 1) % len(values)])

    return change


def grown(model: nn.Module) -> None:
    model.config.inner.names.append("b")
    model.config.inner.gain += 1


def reset_class(model: nn.Module) -> None:
    if hasattr(model, "_fxopt"):
        ClassAttribute.gain = 5.0 - ClassAttribute.gain


PYTHON_FACTS = {
    "self_or_cross": Attack(
        SelfOrCross, [lambda: twins(3), lambda: (rows(3, 4), rows(3, 4)), lambda: twins(5), lambda: (rows(1, 4),) * 2]
    ),
    "cross_or_self": Attack(
        SelfOrCross, [lambda: (rows(3, 4), rows(3, 4)), lambda: twins(3), lambda: (rows(5, 4), rows(5, 4))]
    ),
    "same_in_list": Attack(
        SameInList,
        [lambda: ([*twins(3), rows(3, 4)],), lambda: ([rows(3, 4) for _ in range(3)],), lambda: ([rows(2, 4)] * 3,)],
    ),
    "cached_by_id": Attack(CachedById, [lambda: (rows(3, 4), rows(3, 4)), lambda: twins(3), lambda: twins(2)]),
    "args_with_object": Attack(
        ArgsWithObject, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=toggled("args.use_relu", True, False)
    ),
    "nested_config": Attack(NestedConfig, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=grown),
    "slots": Attack(
        SlotsAndProperties, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=toggled("settings.offset", 1.0, 4.0)
    ),
    "args_replaced": Attack(
        ArgsWithObject,
        [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)],
        between=lambda m: setattr(m, "args", argparse.Namespace(use_relu=False, scale=-1.0)),
    ),
    "class_attribute": Attack(ClassAttribute, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=reset_class),
    "module_global": Attack(ModuleGlobal, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=flip),
    "global_numpy": twice_seeded(DrawsNumpy),
    "own_numpy": twice_seeded(OwnNumpy),
    "own_random": twice_seeded(OwnRandom),
    "own_generator": twice_seeded(OwnGenerator),
    "held_in_list": twice_seeded(HeldInList),
    "asks_requires_grad": Attack(
        AsksRequiresGrad, [lambda g=g: (rows(3, 4).requires_grad_(g),) for g in (False, True, False)], grad=True
    ),
    "asks_none": Attack(
        AsksNone, [lambda: (rows(3, 4),), lambda: (rows(3, 4), rows(3, 4)), lambda: (rows(2, 4), None)]
    ),
}
