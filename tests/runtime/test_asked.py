"""What Python code asks that is no tensor's value: answered for each call, not once for ever."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import random
import time
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of
from tests.runtime import settings

UNVERIFIED = fxopt.Config(verify="off", tune="off")
CONFIGS = pytest.mark.parametrize("config", [UNVERIFIED, fxopt.Config()], ids=["unverified", "default"])

FLAG = False
NESTED = SimpleNamespace(inner=SimpleNamespace(flag=False, other=SimpleNamespace()), options={"flag": False})
ACTIVATIONS = [torch.relu]


def helper(x: Tensor) -> Tensor:
    return x * 2 if FLAG else x


def enclosed():
    flag, state = False, {"factor": 1}

    def read(x):
        return x * state["factor"] + flag

    def write(value):
        nonlocal flag
        flag = value

    return read, write, state


READ, WRITE, STATE = enclosed()


@dataclasses.dataclass
class Options:
    flag: bool = False
    inner: object = None


class Slotted:
    __slots__ = ("flag",)

    def __init__(self):
        self.flag = False


class Counted:
    def __init__(self):
        self.factor, self.others = 1, SimpleNamespace()

    def value(self):
        return self.factor


class Lazy:
    """Finds attributes under other names than it is asked for."""

    def __init__(self):
        vars(self)["items"] = {"flag": SimpleNamespace(value=False)}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self)["items"][name].value


class Asking(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.args = argparse.Namespace(
            use_relu=False, device=torch.device("cpu"), logger=SimpleNamespace(stream=object())
        )
        self.options = Options(inner=Options())
        self.slotted, self.counted, self.lazy = Slotted(), Counted(), Lazy()
        self.held = [Counted()]
        self.by_name = {"one": Counted()}
        self._factor = 1
        self.read = READ

    @property
    def factor(self):
        return self._factor


def relu_where(condition):
    return lambda self, x: torch.relu(x) if condition(self) else x


def set_global(name, value):
    globals()[name] = value


# What forward does, how the answer changes, and how it changes back.
FACTS = {
    "a Namespace beside an object": (
        relu_where(lambda m: m.args.use_relu), lambda m, on: setattr(m.args, "use_relu", on)),
    "a dataclass in a dataclass": (
        relu_where(lambda m: m.options.inner.flag), lambda m, on: setattr(m.options.inner, "flag", on)),
    "a slot": (relu_where(lambda m: m.slotted.flag), lambda m, on: setattr(m.slotted, "flag", on)),
    "behind __getattr__": (
        relu_where(lambda m: m.lazy.flag), lambda m, on: setattr(vars(m.lazy)["items"]["flag"], "value", on)),
    "an object's method": (lambda m, x: x * m.counted.value(), lambda m, on: setattr(m.counted, "factor", 1 + 2 * on)),
    "an object in a list": (lambda m, x: x * m.held[0].factor, lambda m, on: setattr(m.held[0], "factor", 1 + on)),
    "an object in a dict": (
        lambda m, x: x * m.by_name["one"].factor, lambda m, on: setattr(m.by_name["one"], "factor", 1 + on)),
    "a property": (lambda m, x: x * m.factor, lambda m, on: setattr(m, "_factor", 1 + on)),
    "an attribute of the class": (lambda m, x: x * m.scale, lambda m, on: setattr(Asking, "scale", 1.0 + on)),
    "a global": (lambda m, x: x * 2 if FLAG else x, lambda m, on: set_global("FLAG", on)),
    "a global that a function reads": (lambda m, x: helper(x), lambda m, on: set_global("FLAG", on)),
    "settings that are a global": (
        relu_where(lambda m: NESTED.inner.flag), lambda m, on: setattr(NESTED.inner, "flag", on)),
    "a dict in a global": (relu_where(lambda m: NESTED.options["flag"]), lambda m, on: NESTED.options.update(flag=on)),
    "a list that is a global": (
        lambda m, x: ACTIVATIONS[0](x), lambda m, on: ACTIVATIONS.__setitem__(0, torch.tanh if on else torch.relu)),
    "another module's global": (
        relu_where(lambda m: settings.ENABLED), lambda m, on: setattr(settings, "ENABLED", on)),
    "another module's list": (
        lambda m, x: x * settings.FACTORS[0], lambda m, on: settings.FACTORS.__setitem__(0, 1.0 + on)),
    "a variable of an enclosing function": (lambda m, x: READ(x), lambda m, on: WRITE(on)),
    "what an enclosing function holds": (lambda m, x: m.read(x), lambda m, on: STATE.update(factor=1 + on)),
    "the environment": (
        relu_where(lambda m: os.environ.get("FXOPT_TEST_FLAG") == "True"),
        lambda m, on: os.environ.update(FXOPT_TEST_FLAG=str(on))),
    "the default dtype": (
        lambda m, x: x.to(torch.get_default_dtype()),
        lambda m, on: torch.set_default_dtype(torch.float64 if on else torch.float32)),
}  # fmt: skip


def same(left: object, right: object) -> None:
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@CONFIGS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", FACTS)
def test_a_fact_may_change(name, mode, config):
    forward, change = FACTS[name]
    model = type("Model", (Asking,), {"forward": forward})()
    fast = fxopt.optimize(model, config=config)
    try:
        for on in (False, False, True, True, False):
            change(model, on)
            x = torch.randn(3, 4)
            with mode():
                same(fast(x), model(x))
    finally:
        change(model, False)
    entries = dispatcher_of(fast).entries
    assert len(entries) <= 3, "a call that changes nothing is no new capture"
    assert all(entry.executable is not None for entry in entries)


class Together(nn.Module):
    """Asks which inputs are one object, in many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = {
            "is": lambda: q is k,
            "is not": lambda: not (q is not k),
            "in a list": lambda: any(x is k for x in [q, v]),
            "ids": lambda: len({id(q), id(k), id(v)}) < 3,
            "keys of a dict": lambda: len({q: 0, k: 1}) == 1,
            "the last": lambda: k is v,
        }[self.how]()
        return q * 2 + v if one else q - k * v


@CONFIGS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("how", ["is", "is not", "in a list", "ids", "keys of a dict", "the last"])
@pytest.mark.parametrize("first", [(0, 1, 2), (0, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_inputs_that_are_one_object(how, first, mode, config):
    model = Together(how)
    fast = fxopt.optimize(model, config=config)
    for pattern in (first, (0, 0, 1), (0, 1, 2), (0, 1, 1), (0, 1, 0), (0, 0, 0), first):
        x = [torch.randn(3, 4) for _ in range(3)]
        with mode():
            same(fast(*(x[i] for i in pattern)), model(*(x[i] for i in pattern)))
    entries = dispatcher_of(fast).entries
    assert len(entries) == 5 and all(entry.executable is not None for entry in entries)


def test_one_object_in_containers():
    class Features(nn.Module):
        def forward(self, features):
            total = 0
            for number, x in enumerate(features.values()):
                total = total + (x if number and x is features["0"] else x * 3)
            return total

    fast = fxopt.optimize(Features(), config=UNVERIFIED)
    for count in (3, 40):  # few are compared with one another, many by a table
        for shared in ((), (1,), (2, 1), ()):
            x = {str(i): torch.randn(2) for i in range(count)}
            x |= {str(i): x["0"] for i in shared}
            same(fast(x), Features()(x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.grad_fn is None,
        lambda x: x.is_leaf,
        lambda x: x._version == 0,
        lambda x: x.grad is None,
        lambda x: x.storage_offset() == 0,
        lambda x: x._base is None,
        lambda x: x.data_ptr() % 2 == 0,
        lambda x: type(x) is torch.Tensor,
        lambda x: type(x) == nn.Parameter,  # noqa: E721
        lambda x: x.__class__ in (torch.Tensor, float),
    ],
)
def test_what_only_the_object_knows_stays_eager(ask):
    class Asks(nn.Module):
        def forward(self, x):
            return x * 2 if ask(x) else x * 3

    fast = fxopt.optimize(Asks(), config=UNVERIFIED)
    base = torch.randn(9, requires_grad=True)
    for x in (torch.randn(4), base * 2, base[1:5], torch.randn(4).add_(1)):
        same(fast(x), Asks()(x))


def test_a_dtype_is_no_type():
    """torch.bool has the name of a type of Python's, and an error may name the type of anything."""

    class Selects(nn.Module):
        def forward(self, x, rows):
            if rows.dtype == torch.bool:
                return x * rows.unsqueeze(1)
            if not isinstance(rows, Tensor):
                raise ValueError(f"expected rows, found {type(rows)}")
            return x.index_select(0, rows)

    model, x = Selects(), torch.randn(3, 4)
    fast = fxopt.optimize(model)
    for rows in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        same(fast(x, rows), model(x, rows))
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)


def test_what_init_asks_is_not_what_a_call_asks():
    """A method that calls super() holds its class, and makes nothing of it."""

    class Base(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width if type(width) == int else 1, 2)  # noqa: E721

        def layer(self, x):
            return self.linear(x)

    class Twice(Base):
        def layer(self, x):
            return super().layer(x) * 2

        def forward(self, x):
            return self.layer(x)

    model, x = Twice(4), torch.randn(3, 4)
    fast = fxopt.optimize(model, x)
    same(fast(x), model(x))
    assert dispatcher_of(fast).entries[0].executable is not None


@pytest.mark.parametrize(
    "ask",
    [
        lambda: time.time() % 9,
        lambda: monotonic() % 9,
        lambda: datetime.datetime.now().microsecond,
        lambda: os.urandom(1)[0],
    ],
)
def test_the_time_is_asked_at_each_call(ask):
    class Asks(nn.Module):
        def forward(self, x):
            return x * ask()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.linear = Asks(), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.inner(x))

    fast, around = fxopt.optimize(Asks(), config=UNVERIFIED), fxopt.optimize(Around(), config=UNVERIFIED)
    assert len({float(fast(torch.ones(1, dtype=torch.double))) for _ in range(20)}) > 1
    around(torch.randn(2, 4))
    assert "may ask" in dispatcher_of(fast).findings[0].eager_reason
    assert dispatcher_of(around).entries[0].executable is not None  # one opaque call in a graph


GENERATORS = {
    "NumPy": lambda m: np.random.rand(),
    "NumPy's Generator": lambda m: m.generator.random(),
    "RandomState": lambda m: m.state.rand(),
    "Random": lambda m: m.random.random(),
    "Python": lambda m: random.random(),
    "in a container": lambda m: m.held["one"][0].random(),
    "a global": lambda m: GLOBAL.random(),
    "torch's own": lambda m: torch.rand(1).item(),
    "torch's Generator": lambda m: torch.rand(1, generator=m.torch).item(),
}
GLOBAL = np.random.default_rng(5)


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.generator, self.state = np.random.default_rng(1), np.random.RandomState(2)
        self.random, self.held, self.torch = random.Random(3), {"one": [random.Random(4)]}, torch.Generator()
        self.torch.manual_seed(6)
        GLOBAL.bit_generator.state = np.random.default_rng(5).bit_generator.state
        np.random.seed(7)
        random.seed(8)

    def forward(self, x):
        return x * 2 if self.draw(self) < 0.5 else x * 3


@CONFIGS
@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_where_eager_leaves_them(name, example, config):
    draw, x = GENERATORS[name], torch.ones(3)
    before = random.getstate(), np.random.get_state()
    try:
        torch.manual_seed(0)
        model = Drawing(draw)
        expected = [model(x) for _ in range(8)]
        torch.manual_seed(0)
        fast = fxopt.optimize(Drawing(draw), (x,) if example else None, config)
        same([fast(x) for _ in range(8)], expected)
        assert len({float(result[0]) for result in expected}) == 2
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
