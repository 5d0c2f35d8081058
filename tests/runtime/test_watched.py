"""What a forward reads beside tensors, plain attributes, is part of what a capture holds for."""

from __future__ import annotations

import argparse
import logging
import math
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fxopt.names import names_asked
from fxopt.runtime import dispatcher_of
from tests.runtime.models import assert_same, optimize

WHERE = "config"


def _kept_for_later(ask, module):
    return ask(module, module.where)


class ById(nn.Module):
    def __init__(self, attribute, value):
        super().__init__()
        setattr(self, attribute, value)

    def forward(self, x):
        for factor in getattr(self, "factors", []):
            x = x if factor == 1 else x * factor
        if getattr(self, "shift", None) is not None:
            x = x + self.shift
        return x


def test_containers_and_tensors_as_attributes_are_watched():
    x = torch.arange(3.0)
    model = ById("factors", [2, 3])
    fast, recorder = optimize(model)
    assert_same(fast(x), x * 6)
    model.factors.append(5)
    assert_same(fast(x), x * 30)
    model.factors[0] = 7
    assert_same(fast(x), x * 105)
    assert recorder.captures == 3
    model = ById("shift", torch.tensor([1.0]))
    fast, recorder = optimize(model)
    assert_same(fast(x), x + 1)
    model.shift.add_(1)
    assert_same(fast(x), x + 2)
    model.shift = torch.tensor([5.0])
    assert_same(fast(x), x + 5)
    del model.shift
    assert_same(fast(x), x)


@pytest.mark.parametrize("config", [SimpleNamespace(factors=(2, 3)), argparse.Namespace(factors=[2, 3])])
def test_settings_as_attributes_are_watched(config):
    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = config

        def forward(self, x):
            return x * math.prod(self.config.factors)

    x, model = torch.arange(3.0), Configured()
    fast, recorder = optimize(model)
    assert_same(fast(x), x * 6)
    assert_same(fast(x), x * 6)
    model.config.factors = (5,)
    assert_same(fast(x), x * 5)
    assert recorder.captures == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda self: getattr(self, self.where),
        lambda self: vars(self)[self.where],
        lambda self: self.__dict__[self.where],
        lambda self: operator.attrgetter(self.where)(self),
        lambda self: getattr(self, "con" + "fig", None),
        lambda self: getattr(self, WHERE, None),
        lambda self: _kept_for_later(getattr, self),
    ],
)
def test_settings_under_computed_names_are_watched(read):
    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.where = SimpleNamespace(of=SimpleNamespace(factor=2)), "config"

        def forward(self, x):
            return x * read(self).of.factor

    x, model = torch.arange(3.0), Configured()
    fast, _ = optimize(model)
    assert_same(fast(x), x * 2)
    model.config.of.factor = 5
    assert_same(fast(x), x * 5)


N = "a name"


@pytest.mark.parametrize(
    ("function", "globals_", "computed"),
    [
        (lambda x: getattr(x, "a", None), (), False),
        (lambda x: getattr(x.b[0], N), ("N",), False),
        (lambda x: getattr(x(1, "c"), N, 3), ("N",), False),
        (lambda x: [getattr(y, "a", 0) for y in x], (), False),
        (lambda x: getattr(x, x.name), (), True),
        (lambda x: getattr(x, N + "a"), (), True),
        (lambda x: getattr(x, "a" if x else N), (), True),
        (lambda x: getattr(*x), (), True),
        (lambda x: map(getattr, x, "a"), (), True),
        (lambda x: x(getattr, key="a"), (), True),
        (lambda x: x.__dict__["a"], (), True),
    ],
)
def test_names_that_code_gives_to_getattr(function, globals_, computed):
    found, whether = names_asked(function.__code__)
    assert whether is computed
    assert computed or found == set(globals_)


def test_values_in_dicts_that_change_and_change_back():
    """Python's versions of dicts say that nothing changed; when they differ, the values are looked at."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors, self.untold = {"a": 2.0}, 0

        def forward(self, x):
            return x * self.factors["a"]

    x, model = torch.arange(3.0), Scaled()
    fast, _ = optimize(model)
    for factor in (2.0, 2.0, 5.0, 2.0, 2.0):
        model.factors["a"] = factor
        assert_same(fast(x), x * factor)
    model.untold = 1
    assert_same(fast(x), x * 2)
    del model.factors["a"]
    with pytest.raises(KeyError):
        fast(x)
    model.factors = {"b": 1, "a": 3.0}
    assert_same(fast(x), x * 3)


def test_arrays_as_attributes_are_watched():
    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.offsets = np.array([0, 10, 20])

        def forward(self, x):
            return x + x.new_tensor(self.offsets) + torch.as_tensor(self.offsets)

    x, model = torch.arange(3), Offset()
    fast, recorder = optimize(model)
    assert_same(fast(x), torch.tensor([0, 21, 42]))
    assert_same(fast(x), torch.tensor([0, 21, 42]))
    model.offsets[1] = 5
    assert_same(fast(x), torch.tensor([0, 11, 42]))
    assert recorder.captures == 2


def test_sizes_that_only_python_reads_are_watched():
    """Of a buffer that the graph does not use, and of tensors that are no state."""

    class Vocabulary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("vocabulary", torch.zeros(5))
            self.edges = [torch.arange(4.0)]

        def forward(self, x):
            return torch.bucketize(x, self.edges[0]).clamp(0, 4) % self.vocabulary.numel()

    x, model = torch.tensor([-1.0, 1.5, 9.0]), Vocabulary()
    fast, recorder = optimize(model)
    assert_same(fast(x), torch.tensor([0, 2, 4]))
    model.vocabulary.fill_(1)
    model.edges[0].sub_(1)
    assert_same(fast(x), torch.tensor([0, 3, 4]))
    assert recorder.captures == 1
    model.vocabulary = torch.zeros(3)
    assert_same(fast(x), torch.tensor([0, 0, 1]))
    model.edges[0].resize_(6).fill_(0)
    assert_same(fast(x), torch.tensor([0, 1, 1]))
    assert recorder.captures == 3


def test_a_container_may_hold_itself():
    factors: list = [[2]]
    factors[0].append(factors)
    model = ById("note", factors)
    fast, recorder = optimize(model)
    x = torch.arange(3.0)
    for _ in range(3):
        assert_same(fast(x), x)
    assert recorder.captures <= 1


def test_large_containers_are_watched_by_length():
    model = ById("factors", [1] * 5000)
    fast, recorder = optimize(model)
    x = torch.arange(3.0)
    model.shift = torch.zeros(1)
    assert_same(fast(x), x)
    model.factors.append(3)
    assert_same(fast(x), x * 3)
    assert recorder.captures == 2


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(("place", "kind"), [(0, Shifted), (1, nn.Sigmoid), (1, nn.Tanh)])
def test_a_layer_that_becomes_another_class(place, kind):
    """As libraries do that patch layers: `linear.__class__ = LoRALinear`."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    fast, recorder = optimize(model)
    x = torch.randn(3, 4)
    assert_same(fast(x), model.forward(x))
    model[place].__class__ = kind
    assert_same(fast(x), nn.Sequential.forward(model, x))
    assert recorder.captures == 2


FACTORS = {torch.ops.aten.relu.default: 2, torch.ops.aten.relu: 3}


def test_what_torch_keeps_in_its_operators_is_not_watched():
    """A trace fills their caches, so that no capture would ever fit the call that it was made from."""

    class Reads(nn.Module):
        def forward(self, x):
            factors = [FACTORS[operator] for operator in (torch.ops.aten.relu.default, torch.ops.aten.relu)]
            for name in ("relu", "neg"):
                x = getattr(x, name)()
            return x * factors[0] + factors[1]

    model, x = Reads(), torch.randn(3)
    fast, recorder = optimize(model)
    assert_same(fast(x), model(x))
    assert recorder.captures == 1 and dispatcher_of(fast).entries[0].executable is not None
    FACTORS[torch.ops.aten.relu] = 5
    assert_same(fast(x), model(x))
    FACTORS[torch.ops.aten.relu] = 3


def test_of_loggers_only_plain_values_are_watched():
    """A trace creates loggers, and asks others whether they log, which they remember."""
    logger = logging.getLogger("of_a_model")

    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self._cache = self.filters = None

        def forward(self, x):
            if self.training and logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", logger.manager.loggerDict)
            return x * 2 if logger.level == logging.ERROR else vars(self).get("shift", 1) + x

    model, x = Telling().eval(), torch.randn(3)
    fast, recorder = optimize(model)
    assert_same(fast(x), x + 1)
    logging.getLogger("one_more_of_a_model")
    logger.isEnabledFor(logging.INFO)
    assert_same(fast(x), x + 1)
    assert recorder.captures == 1 and recorder.runs == 2
    logger.setLevel(logging.ERROR)
    assert_same(fast(x), x * 2)
