"""What a forward reads beside tensors, plain attributes, is part of what a capture holds for."""

from __future__ import annotations

import argparse
import math
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.models import assert_same, optimize


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
