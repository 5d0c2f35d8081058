"""Code that a forward runs without naming it, and values that it reads deep inside: changed between calls."""

from __future__ import annotations

import argparse
import collections
import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.attacks.attack import Attack
from tests.attacks.sizes import rows

GAIN = types.SimpleNamespace(value=2.0)  # read behind all of these
ACT: Callable = torch.relu
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def scaled(x: Tensor) -> Tensor:
    return x * GAIN.value


OPERATIONS = {"scaled": scaled, "other": lambda x: x + GAIN.value}


class Factor:
    def __mul__(self, x: Tensor) -> Tensor:
        return x * GAIN.value

    def __contains__(self, key: str) -> bool:
        return GAIN.value > 2

    def __float__(self) -> float:
        return GAIN.value

    def __get__(self, owner: Any, kind: type | None = None) -> float:
        return GAIN.value

    def __call__(self, x: Tensor) -> Tensor:
        return x * GAIN.value


class Registry:
    def __init__(self) -> None:
        self._values, self._lock = {"gain": 2.0}, threading.Lock()

    def get(self, name: str) -> float:
        with self._lock:
            return self._values[name]


class Meta(type):
    @property
    def gain(cls) -> float:
        return GAIN.value


class WithMeta(metaclass=Meta):
    class Inner:
        gain = 1.0


@functools.singledispatch
def dispatched(x: Any) -> Any:
    return x


@dispatched.register
def _(x: torch.Tensor) -> Tensor:
    return scaled(x)


FACTOR, REGISTRY, BOUND = Factor(), Registry(), Factor().__call__


class Runs(nn.Module):
    """`run(module, x)`, with what the module holds."""

    factor = Factor()
    table = types.MappingProxyType({"scaled": scaled})

    def __init__(self, run: Callable[[Any, Tensor], Any], held: Any = None):
        super().__init__()
        self.run, self.held = run, held

    def forward(self, x):
        return self.run(self, x)


def louder(model: nn.Module) -> None:
    """Once for both models, which read the same globals."""
    if hasattr(model, "_fxopt"):
        GAIN.value += 1
        REGISTRY._values["gain"] = WithMeta.Inner.gain = GAIN.value
        VARIABLE.set(GAIN.value)
        globals()["ACT"] = torch.tanh if ACT is torch.relu else torch.relu


BY_CODE = {
    "operator": lambda m, x: FACTOR * x,
    "contains": lambda m, x: x * 2 if "a" in FACTOR else x,
    "float": lambda m, x: x * float(FACTOR),
    "descriptor": lambda m, x: x * m.factor,
    "dict_of_functions": lambda m, x: OPERATIONS["scaled"](x),
    "dict_of_lambdas": lambda m, x: OPERATIONS["other"](x),
    "functions_of_a_class": lambda m, x: m.table["scaled"](x),
    "default": lambda m, x, act=scaled: act(x),
    "keyword_default": lambda m, x, *, act=scaled: act(x),
    "callable_object": lambda m, x: FACTOR(x),
    "bound_method": lambda m, x: BOUND(x),
    "registry": lambda m, x: x * REGISTRY.get("gain"),
    "builtin": lambda m, x: ACT(x),
    "metaclass": lambda m, x: x * WithMeta.gain,
    "nested_class": lambda m, x: x * WithMeta.Inner.gain,
    "dispatch_by_type": lambda m, x: dispatched(x),
    "context_variable": lambda m, x: x * VARIABLE.get(),
    "text": lambda m, x: eval("x * GAIN.value", globals(), {"x": x}),
}


class Quiet:
    gain = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Loud(Quiet):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 3


def nested(*names: str, **last: Any) -> Any:
    """A namespace in a list in a namespace in a list."""
    found: Any = types.SimpleNamespace(**last)
    for name in reversed(names):
        found = types.SimpleNamespace(**{name: [found]})
    return found


def without_later() -> None:
    globals().pop("LATER", None)


def later(model: nn.Module) -> None:
    globals()["LATER"] = globals().get("LATER", 1.0) + 1


def later_name(model: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * LATER  # type: ignore[name-defined]
    except NameError:
        return x


def own_class(**members: Any) -> Any:
    return type("Own", (Quiet,), members)()


def with_default() -> Callable:
    return types.FunctionType((lambda x, gain=2.0: x * gain).__code__, globals(), "with_default", (2.0,))


def marked() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(1))
    weight.gain = 2.0  # type: ignore[attr-defined]
    return weight


def referred() -> Any:
    KEPT.append(Quiet())
    return weakref.WeakValueDictionary(a=KEPT[-1])


def held_module() -> types.ModuleType:
    module = types.ModuleType("settings_of_a_model")
    module.gain = 2.0  # type: ignore[attr-defined]
    return module


def more_of(value: Any) -> None:
    value.gain += 1.0


KEPT: list[Any] = []


def linear() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 4)


def more(model: Any) -> None:
    model.held.gain = getattr(model.held, "gain", 1.0) + 1


def far_inside(model: Any) -> None:
    model.held.a[0].b[0].c[0].d[0].gain += 1


def reordered(model: Any) -> None:
    model.held["a"] = model.held.pop("a")


def new_list_then_edited(model: Any) -> None:
    model.held = list(model.held)
    model.held[0] += 1.0


def other_weight(model: Any) -> None:
    model.held[0].weight = nn.Parameter(model.held[0].weight.detach() * 2)


def toggled_training(model: Any) -> None:
    layer = model.held[0] if isinstance(model.held, list) else model.held
    layer.train(not layer.training)


def toggled_gradients(model: Any) -> None:
    model.held.weight.requires_grad_(not model.held.weight.requires_grad)


def hooked(model: Any) -> None:
    model.held[0].register_forward_hook(lambda layer, given, result: result * 2)


def assigned(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda model: model.held.__setitem__(key, value)


# What is held, what is done with it, and what the user does to it between two calls.
BY_VALUE: dict[str, tuple[Callable[[], Any], Callable, Callable[[Any], Any]]] = {
    "order": (lambda: {"a": 1, "b": 2}, lambda m, x: torch.stack([x * v for v in m.held.values()]), reordered),
    "equal_of_another_type": (lambda: [2], lambda m, x: x.long() * m.held[0], assigned(0, 2.0)),
    "class": (Quiet, lambda m, x: m.held(x), lambda m: setattr(m.held, "__class__", Loud)),
    "deque": (lambda: collections.deque([1.0]), lambda m, x: x * sum(m.held), lambda m: m.held.append(5.0)),
    "in_a_tuple": (lambda: ([1.0],), lambda m, x: x * sum(m.held[0]), lambda m: m.held[0].append(5.0)),
    "array": (lambda: [np.ones(4)], lambda m, x: x * float(m.held[0][0]), lambda m: m.held[0].__setitem__(0, 5)),
    "bytes": (lambda: bytearray(b"ab"), lambda m, x: x * m.held[0], assigned(0, 5)),
    "mapping": (lambda: collections.UserDict(a=1.0), lambda m, x: x * m.held["a"], assigned("a", 5.0)),
    "new_list_then_edited": (lambda: [2.0], lambda m, x: x * m.held[0], new_list_then_edited),
    "far_inside": (lambda: nested(*"abcd", gain=1.0), lambda m, x: x * m.held.a[0].b[0].c[0].d[0].gain, far_inside),
    "computed": (lambda: argparse.Namespace(gain=1.0, log=print), lambda m, x: x * getattr(m.held, "ga" + "in"), more),
    "added": (argparse.Namespace, lambda m, x: x * getattr(m.held, "gain", 1.0), more),
    "hidden_weight": (lambda: [linear()], lambda m, x: m.held[0](x), other_weight),
    "hidden_mode": (lambda: [nn.Dropout(0.5)], lambda m, x: m.held[0](x), toggled_training),
    "hidden_hook": (lambda: [linear()], lambda m, x: m.held[0](x), hooked),
    "asks_gradients": (linear, lambda m, x: x * (2 if m.held.weight.requires_grad else 3), toggled_gradients),
    "patched_operator": (
        lambda: own_class(__mul__=lambda s, x: x * 2),
        lambda m, x: m.held * x,
        lambda m: setattr(type(m.held), "__mul__", lambda s, x: x * 5),
    ),
    "other_code": (
        with_default,
        lambda m, x: m.held(x),
        lambda m: setattr(m.held, "__code__", (lambda x: -x).__code__),
    ),
    "other_default": (with_default, lambda m, x: m.held(x), lambda m: setattr(m.held, "__defaults__", (5.0,))),
    "hidden_by_class": (
        own_class,
        lambda m, x: x * getattr(m.held, "late", 1.0),
        lambda m: setattr(type(m.held), "late", 2.0),
    ),
    "class_of_model": (
        Quiet,
        lambda m, x: x * getattr(m, "late", 1.0),
        lambda m: setattr(type(m), "late", getattr(m, "late", 1.0) + 1),
    ),
    "on_a_tensor": (marked, lambda m, x: x * m.held.gain, lambda m: setattr(m.held, "gain", 3.0)),
    "read_from_a_tensor": (lambda: [torch.ones(1)], lambda m, x: x * m.held[0].item(), lambda m: m.held[0].add_(1)),
    "listed_from_a_tensor": (
        lambda: [torch.ones(2)],
        lambda m, x: x * m.held[0].tolist()[1],
        lambda m: m.held[0].add_(1),
    ),
    "array_of_a_tensor": (lambda: [torch.ones(1)], lambda m, x: x * m.held[0].numpy()[0], lambda m: m.held[0].add_(1)),
    "array_without_dims": (lambda: np.array(2.0), lambda m, x: x * m.held.item(), lambda m: m.held.fill(5.0)),
    "in_a_key": (
        lambda: collections.UserDict({Quiet(): 1}),
        lambda m, x: x * next(iter(m.held)).gain,
        lambda m: more_of(next(iter(m.held))),
    ),
    "behind_a_reference": (referred, lambda m, x: x * m.held["a"].gain, lambda m: more_of(m.held["a"])),
    "held_module": (held_module, lambda m, x: x * m.held.gain, lambda m: setattr(m.held, "gain", 5.0)),
    "later_global": (without_later, lambda m, x: x * globals().get("LATER", 1.0), later),
    "later_name": (without_later, later_name, later),
    "asks_mode": (linear, lambda m, x: x * (2 if m.held.training else 3), toggled_training),
}


def thrice(model: Callable[[], nn.Module], between: Callable) -> Attack:
    return Attack(model, [lambda n=n: (rows(n, 4),) for n in (3, 3, 4)], between=between)


SEEN_CODE = {name: thrice(lambda run=run: Runs(run), louder) for name, run in BY_CODE.items()}
SEEN_VALUES = {
    name: thrice(lambda run=run, make=make: Runs(run, make()), change) for name, (make, run, change) in BY_VALUE.items()
}
