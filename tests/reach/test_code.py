"""What a forward reads of the user's code and objects, and what of it is watched."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import fxopt
from fxopt.reach import code as reachable
from fxopt.reach import held
from fxopt.runtime import dispatcher_of
from fxopt.runtime.inside import Inside


def scaled(x):
    return x * SCALE


def several(x):
    return scaled(scaled(x))


SCALE = 2.0


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return several(self.linear(x))


@pytest.mark.parametrize("limit", ["_MOST_FUNCTIONS", "MOST_OBJECTS"])
@pytest.mark.parametrize("most", [2, 500])
def test_what_nobody_follows_is_no_graph(limit, most, monkeypatch):
    for module in (reachable, held):
        monkeypatch.setattr(module, limit, most, raising=False)
    eager = Deep().eval()
    model, x = fxopt.optimize(eager), torch.randn(3, 4)
    with torch.no_grad():
        model(x)
        (entry,) = dispatcher_of(model).entries
        assert ("too many to see what changes them" in entry.findings.eager_reason) == (most == 2)
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        assert torch.allclose(model(x), eager.linear(x) * 9)


SETTINGS = {"scale": 1.0}


def setting():
    return SETTINGS["scale"]


def call(function):
    return function()


def decorated(function):
    @functools.wraps(function)
    def wrapper():
        return function()

    return wrapper


def behind_lists(depth):
    outer = SETTINGS
    for _ in range(depth):
        outer = [outer]

    def read():
        inner = outer
        while isinstance(inner, list):
            (inner,) = inner
        return inner["scale"]

    return read


def behind_methods(depth):
    class Link:
        def __init__(self, behind):
            self.behind = behind

        def __call__(self):
            return self.behind()

    function = setting
    for _ in range(depth):
        function = Link(function)
    return function


def behind_calls(wrap):
    def wrapped(depth):
        return functools.reduce(lambda function, _: wrap(function), range(depth), setting)

    return wrapped


DEEP = {
    "partial": behind_calls(lambda function: functools.partial(call, function)),
    "wraps": behind_calls(decorated),
    "list": behind_lists,
    "objects": behind_methods,
}


class Behind(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 2), read

    def forward(self, x):
        return self.linear(x) * self.read()


@pytest.mark.parametrize("depth", [1, 7, 40])
@pytest.mark.parametrize("kind", DEEP)
def test_what_lies_deep_is_watched(kind, depth, monkeypatch):
    eager = Behind(DEEP[kind](depth)).eval()
    model, x = fxopt.optimize(eager), torch.randn(3, 4)
    with torch.no_grad():
        for scale in (2.0, 3.0):
            monkeypatch.setitem(SETTINGS, "scale", scale)
            torch.testing.assert_close(model(x), eager(x))
        assert all(entry.executable for entry in dispatcher_of(model).entries)


def test_names_of_what_lies_deep_are_short():
    """In a chain of many objects each name would hold those of all before it."""
    model = Behind(behind_methods(400))
    inside = Inside([("read", model.read)], reachable.Code.behind([model]))
    assert len(inside.slots) >= 400 and max(len(str(slot)) for slot in inside.slots) < 600


class Logs(nn.Module):
    """As a LightningModule, whose method log() leads to all of its trainer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def log(self, x):
        return several(x)

    def forward(self, x):
        return self.linear(x) * math.log(SCALE + 1)


class LogsAlso(Logs):
    def forward(self, x):
        return self.log(self.linear(x)) * math.log(3)


@pytest.mark.parametrize("model", [Logs, LogsAlso])
def test_a_function_of_a_library_is_no_method_of_its_name(model, monkeypatch):
    eager = model().eval()
    fast, x = fxopt.optimize(eager), torch.randn(3, 4)
    with torch.no_grad():
        for scale in (2.0, 3.0):
            monkeypatch.setitem(globals(), "SCALE", scale)
            torch.testing.assert_close(fast(x), eager(x))
    read = {function.__qualname__ for function in reachable.Code.behind([eager]).functions.values()}
    assert ("scaled" in read) == (model is LogsAlso)
    assert all(entry.executable for entry in dispatcher_of(fast).entries)
