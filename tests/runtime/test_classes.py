"""Models of unusual classes, and the class that is made for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.runtime.models import Tower, assert_same, optimize

REGISTRY = []


class Registered(nn.Module):
    def __init_subclass__(cls, tag, **kwargs):
        REGISTRY.append(tag)


class Meta(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.made_by_meta = True
        return made


class Odd(Registered, metaclass=Meta, tag="odd"):
    """A registry, a metaclass, __call__ and __getattr__ of its own."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def __getattr__(self, name):
        return 7 if name == "lucky" else super().__getattr__(name)

    def __call__(self, x, twice=False):
        out = super().__call__(x)
        return out + out if twice else out

    def forward(self, x):
        return self.lin(x) * self.lucky


class Slotted(nn.Module):
    __slots__ = ("gain",)

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.gain = 2.0

    def forward(self, x):
        return self.lin(x) * self.gain


def test_slots_are_shared():
    model = Slotted()
    fast, _ = optimize(model)
    x = torch.randn(4, 3)
    assert "gain" not in vars(model)
    for gain in (2.0, 3.0):
        model.gain = gain
        assert fast.gain == gain
        assert_same(fast(x), model(x))
    fast.gain = 4.0
    assert model.gain == 4.0
    assert_same(fast(x), model(x))


def test_odd_classes():
    model = Odd()
    fast, recorder = optimize(model)
    x = torch.randn(4, 3)
    assert_same(fast(x, twice=True), model(x, twice=True))
    assert recorder.runs == 1
    assert REGISTRY == ["odd"]
    assert fast.lucky == 7 and fast.made_by_meta
    with pytest.raises(AttributeError):
        fast.missing  # noqa: B018


def test_graph_module_and_recompile():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    fast, recorder = optimize(model)
    x = torch.randn(4, 3)
    assert_same(fast(x), model(x))
    assert recorder.runs == 1
    assert_same(copy.deepcopy(fast)(x), model(x))
    assert_same(pickle.loads(pickle.dumps(fast))(x), model(x))
    relu = next(n for n in model.graph.nodes if n.op == "call_module" and n.target == "1")
    relu.replace_all_uses_with(relu.args[0])
    model.graph.erase_node(relu)
    model.recompile()
    assert (model(x) < 0).any()
    assert_same(fast(x), model(x))


def test_class_is_reused_and_collected():
    import gc
    import weakref

    fast, _ = optimize(Tower())
    other, _ = optimize(Tower())
    assert type(fast) is type(other)

    def build():
        model = torch.fx.symbolic_trace(nn.Linear(2, 2))
        return weakref.ref(type(optimize(model)[0]))

    kind = build()
    gc.collect()
    assert kind() is None
