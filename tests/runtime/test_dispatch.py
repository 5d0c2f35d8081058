"""Which calls share a capture, which do not, and what happens to calls that no capture serves."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt.config import Config
from fxopt.runtime import Executable, dispatcher_of, optimized
from tests.runtime.models import Recorder, Tower, assert_same, optimize, tower_inputs

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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = x
        return x * self.calls


def test_a_forward_that_assigns_stays_eager():
    model = Counting()
    fast, recorder = optimize(model)
    for call in range(1, 6):
        x = torch.ones(2)
        assert_same(fast(x), x * call)
        assert model.calls == call
        assert type(model.last) is torch.Tensor and model.last is x
    assert recorder.captures == 1, "and is not captured again and again"
    assert recorder.runs == 0
    assert dispatcher_of(fast).findings[0].eager_reason


class DataDependent(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x - 1


def test_what_cannot_be_captured_stays_eager_and_says_why():
    model = DataDependent()
    fast, recorder = optimize(model)
    for sign in (1, -1, 1):
        x = torch.full((3,), float(sign))
        assert_same(fast(x), model(x))
    assert recorder.captures == 1
    (findings,) = dispatcher_of(fast).findings
    assert findings.eager_reason


def test_unsupported_arguments_run_eagerly():
    class Takes(nn.Module):
        def forward(self, x, extra=None):
            return torch.mm(x, torch.eye(3)) if x.layout is torch.strided else torch.sparse.mm(x, torch.eye(3))

    fast, recorder = optimize(Takes())
    dense = torch.eye(3)
    assert_same(fast(dense.to_sparse()), dense)
    assert_same(fast(dense, extra=object()), dense)
    assert recorder.captures == 0
    reasons = [f.eager_reason for f in dispatcher_of(fast).findings]
    assert any("sparse" in r for r in reasons) and any("object" in r for r in reasons)
    assert_same(fast(dense), dense)
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


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, ids):
        if x.dim() != 2:
            raise ValueError("expected a matrix")
        return self.lin(x) + nn.functional.embedding(ids, self.lin.weight[:, :2])


def test_exceptions_are_those_of_eager():
    fast, recorder = optimize(Raising())
    x, ids = torch.randn(4, 3), torch.randint(0, 2, (4,))
    calls = {ValueError: (torch.randn(3), ids), IndexError: (x, ids + 2), RuntimeError: (torch.randn(4, 5), ids)}
    for repeat in range(2):
        for kind, args in calls.items():
            with pytest.raises(kind) as caught:
                fast(*args)
            assert type(caught.value) is kind
            assert caught.value.__context__ is None
        fast(x, ids)
        assert recorder.runs >= repeat + 1
    with pytest.raises(TypeError, match="forward"):
        fast(x)


class BadId(IndexError):
    pass


def test_a_more_special_error_than_eagers_is_raised():
    def compile(model, args, kwargs):
        recorded = Recorder()(model, args, kwargs)

        def run(*tensors):
            if (tensors[-1] > 10).any():
                raise BadId("column 3: id 99")
            return recorded.run(*tensors)

        return Executable(recorded.capture, run)

    fast = optimized(Tower().eval(), compile)
    dense, ids = tower_inputs()
    fast(dense, ids)
    with pytest.raises(BadId, match="column 3: id 99") as caught:
        fast(dense, ids + 11)
    assert caught.value.__suppress_context__
    assert_same(fast(dense, ids), dispatcher_of(fast).original(dense, ids))
    assert dispatcher_of(fast).entries[0].executable is not None


def test_a_graph_that_fails_where_eager_does_not_is_dropped():
    def compile(model, args, kwargs):
        def run(*tensors):
            raise RuntimeError("kernel broke")

        return Executable(Recorder()(model, args, kwargs).capture, run)

    model = Tower().eval()
    fast = optimized(model, compile)
    inputs = tower_inputs()
    for _ in range(3):
        assert_same(fast(*inputs), model(*inputs))
    (findings,) = dispatcher_of(fast).findings
    assert "kernel broke" in findings.eager_reason


def test_a_compile_that_fails_leaves_the_model_eager():
    def compile(model, args, kwargs):
        raise KeyError("a bug")

    model = Tower().eval()
    fast = optimized(model, compile)
    inputs = tower_inputs()
    assert_same(fast(*inputs), model(*inputs))
    assert "a bug" in dispatcher_of(fast).findings[0].eager_reason


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


def test_prepare_reports_bad_inputs_and_leaves_no_trace():
    model = Raising()
    fast, _ = optimize(model)
    with pytest.raises(ValueError, match="expected a matrix"):
        dispatcher_of(fast).prepare((torch.randn(3), torch.tensor([0])))
    assert not dispatcher_of(fast).entries
    counting = Counting()
    fast, _ = optimize(counting)
    dispatcher_of(fast).prepare((torch.ones(2),))
    assert counting.calls == 0
    assert dispatcher_of(fast).findings[0].eager_reason
