"""Which calls share a capture, and which do not."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt.config import Config
from fxopt.runtime import dispatcher_of
from tests.runtime.models import Tower, assert_same, optimize, tower_inputs

Pair = namedtuple("Pair", "a b")


@dataclass
class Batch:
    dense: torch.Tensor
    ids: list


pytree.register_dataclass(Batch)


class Nested(nn.Module):
    """Adds up whatever tensors it is given, in order; strings and numbers scale them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args, **kwargs):
        total, factor = self.weight, 1
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                total = total * 3 + leaf.sum()
            elif isinstance(leaf, (int, float)) and leaf is not True:
                factor = factor * leaf
        first = total * factor
        return {"sum": first, "list": [first + 1, (first + 2,)], "pair": Pair(first, [])}


def t(*shape):
    return torch.randn(*shape)


STRUCTURES = {
    "one": ((t(2),), {}),
    "two": ((t(2), t(3)), {}),
    "tuple": (((t(2), t(3)),), {}),
    "list": (([t(2), t(3)],), {}),
    "longer list": (([t(2), t(3), t(1)],), {}),
    "nested": (([t(2), [t(3), (t(1),)]],), {}),
    "keyword": ((t(2),), {"x": t(3)}),
    "other keyword": ((t(2),), {"y": t(3)}),
    "dict": (({"a": t(2), "b": t(3)},), {}),
    "dict in another order": (({"b": t(2), "a": t(3)},), {}),
    "dict with other keys": (({"a": t(2), "c": t(3)},), {}),
    "ordered dict": ((OrderedDict(a=t(2), b=t(3)),), {}),
    "named tuple": ((Pair(t(2), t(3)),), {}),
    "dataclass": ((Batch(t(2), [t(3), t(1)]),), {}),
    "dataclass with a constant": ((Batch(t(2), [t(3), 4]),), {}),
    "rank": ((t(2, 2),), {}),
    "dtype": ((t(2).double(),), {}),
    "integers": ((torch.arange(3),), {}),
    "int constant": ((t(2), 3), {}),
    "other int constant": ((t(2), 4), {}),
    "float constant": ((t(2), 3.0), {}),
    "zero": ((t(2), 0.0), {}),
    "minus zero": ((t(2), -0.0), {}),
    "none": ((t(2), None), {}),
    "true": ((t(2), True), {}),
    "string": ((t(2),), {"mode": "sum"}),
    "empty list": ((t(2), []), {}),
    "empty dict": ((t(2), {}), {}),
}


def test_each_structure_is_its_own_capture():
    model = Nested()
    fast, recorder = optimize(model, Config(max_captures=100))
    for repeat in range(2):
        for number, (name, (args, kwargs)) in enumerate(STRUCTURES.items()):
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            out, expected = fast(*args, **kwargs), model(*args, **kwargs)
            assert pytree.tree_structure(out) == pytree.tree_structure(expected)
            assert_same(pytree.tree_leaves(out), pytree.tree_leaves(expected))
            assert type(out["pair"]) is Pair
            assert recorder.captures == (number + 1 if repeat == 0 else len(STRUCTURES)), name
    assert recorder.runs == 2 * len(STRUCTURES)


def test_sizes_share_a_capture():
    model = Tower().eval()
    fast, recorder = optimize(model)
    for batch in (6, 1, 0, 2, 4096, 3):
        inputs = tower_inputs(batch)
        assert_same(fast(*inputs), model(*inputs))
    assert recorder.captures == 1 and recorder.runs == 6


def test_sizes_that_must_agree_and_sizes_that_need_not():
    model = Tower().eval()
    fast, recorder = optimize(model)
    fast(*tower_inputs(4))
    dense, ids = torch.randn(4, 3), torch.randint(0, 11, (5, 2))
    with pytest.raises(RuntimeError, match=r"Sizes of tensors must match|Expected 4 but got 5|size"):
        fast(dense, ids)
    assert recorder.captures == 2, "the failed attempt is not remembered"
    assert len(dispatcher_of(fast).entries) == 1

    class Free(nn.Module):
        def forward(self, a, b):
            return a.sum() + b.sum()

    free, recorder = optimize(Free())
    for sizes in ((3, 3), (3, 5), (1, 0)):
        free(torch.randn(sizes[0]), torch.randn(sizes[1]))
    assert recorder.captures == 1


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 10 else x.flip(0)


def test_size_guards_select_the_capture():
    model = Branching()
    fast, _ = optimize(model)
    for size in (3, 12, 4, 10, 11, 100):
        x = torch.randn(size)
        assert_same(fast(x), model(x))


def test_grad_mode_is_ambient():
    model = Tower().eval()
    fast, recorder = optimize(model)
    inputs = tower_inputs()
    with torch.no_grad():
        assert not fast(*inputs).requires_grad
    with torch.inference_mode():
        assert fast(*inputs).is_inference()
    assert recorder.captures == 1
    assert fast(*inputs).requires_grad
    assert recorder.captures == 2 and recorder.runs == 3


def test_autocast_and_default_dtype_are_ambient():
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return self.lin(x) + torch.ones(3)

    model = Makes()
    fast, recorder = optimize(model)
    x = torch.randn(2, 3)
    plain = fast(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(fast(x), model(x))
    assert recorder.captures == 2
    torch.set_default_dtype(torch.float64)
    try:
        assert fast(x).dtype == model(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(fast(x), plain)
    assert recorder.captures == 3


def test_default_device_mode_still_optimizes():
    model = Tower().eval()
    fast, recorder = optimize(model)
    inputs = tower_inputs()
    with torch.device("cpu"):
        assert_same(fast(*inputs), model(*inputs))
    assert recorder.runs == 1


def test_max_captures():
    model = Nested()
    fast, recorder = optimize(model, Config(max_captures=2))
    for number in range(4):
        assert_same(fast(torch.ones(2), number)["sum"], model(torch.ones(2), number)["sum"])
    assert recorder.captures == 2
    assert any("max_captures" in f.eager_reason for f in dispatcher_of(fast).findings)
    runs = recorder.runs
    fast(torch.ones(2), 0)
    assert recorder.runs == runs + 1


def test_capture_leaves_the_random_state_alone():
    model = Tower().train()
    fast, recorder = optimize(model)
    inputs = tower_inputs()
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(fast(*inputs))
    assert recorder.captures == 1
    assert_same(*outs)


def test_prepare_captures_without_a_call():
    model = Tower().eval()
    fast, recorder = optimize(model)
    inputs = tower_inputs()
    dispatcher_of(fast).prepare(inputs)
    dispatcher_of(fast).prepare(inputs, {})
    assert recorder.captures == 1 and recorder.runs == 0
    assert_same(fast(*inputs), model(*inputs))
    assert recorder.captures == 1
