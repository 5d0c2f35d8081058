"""Attributes that a forward assigns, and a `__call__` of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt import Config
from fxopt.runtime import dispatcher_of, optimized
from fxopt.runtime.capturable import NoGraph
from fxopt.runtime.stores import Stores
from tests.runtime.models import assert_same, optimize


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(3, 2)
        self.offset = 1.0

    def forward(self, x):
        self.scores = self.weight(x).softmax(-1)
        return self.scores * 2 + self.offset


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scores()

    def forward(self, x):
        self.last, self.count = [x, x + 1], 3
        return self.inner(x)


@pytest.mark.parametrize("prepared", [False, True])
def test_what_the_capture_stores_is_no_change(prepared):
    model = Outer()
    fast, recorder = optimize(model)
    if prepared:
        dispatcher_of(fast).prepare((torch.rand(5, 3),))
    for batch in (64, 1, 3, 64):
        x = torch.rand(batch, 3)
        expected = Outer.forward(model, x)
        scores = model.inner.scores
        del model.inner.scores, model.last
        assert_same(fast(x), expected)
        assert_same(fast.inner.scores, scores)
        assert fast.last[0] is x and fast.count == 3
    assert recorder.captures == len(dispatcher_of(fast).entries) == 1
    assert recorder.runs == 4


def test_other_attributes_of_the_same_module_still_count():
    model = Outer()
    fast, recorder = optimize(model)
    x = torch.rand(2, 3)
    fast(x)
    model.inner.offset = 5.0
    assert_same(fast(x), Outer.forward(model, x))
    assert recorder.captures == 2
    model.inner.extra = 1
    fast(x)
    assert recorder.captures == 3, "a new attribute may shadow one of the class"


def test_stores_reach_the_model_despite_root_hooks():
    model = Scores()
    fast, recorder = optimize(model)
    fast.register_forward_hook(lambda module, args, out: out + 1)
    x = torch.rand(2, 3)
    expected = Scores.forward(model, x) + 1
    scores = vars(model).pop("scores")
    assert_same(fast(x), expected)
    assert_same(model.scores, scores)
    assert recorder.runs == 1


def test_a_call_of_the_users_own_stays_around_the_graph():
    class Doubling(nn.Module):
        def __call__(self, x):
            return 2 * super().__call__(x)

        def forward(self, x):
            return x + 1

    model = Doubling()
    fast, recorder = optimize(model)
    for batch in (4, 2):
        x = torch.rand(batch)
        assert_same(fast(x), model(x))
    assert recorder.runs == 2


class Odd(Exception):
    def __init__(self, code, extra):
        super().__init__(f"code {code}")
        self.code, self.extra = code, extra


class Fails(nn.Module):
    def forward(self, x, kind="odd"):
        if kind == "odd":
            raise Odd(7, [1])
        if kind == "stop":
            return next(iter([]))
        return torch.mm(x, x)


@pytest.mark.parametrize(("kind", "error"), [("odd", Odd), ("stop", StopIteration), ("mm", RuntimeError)])
def test_the_models_own_error_is_raised(kind, error):
    import fxopt

    model, x = Fails(), torch.rand(2, 3)
    with pytest.raises(error) as eager:
        model(x, kind)
    with pytest.raises(error) as prepared:
        fxopt.optimize(model, (x, kind))
    fast = fxopt.optimize(model)
    with pytest.raises(error) as called:
        fast(x, kind)
    for found in (prepared.value, called.value):
        assert type(found) is type(eager.value) and str(found) == str(eager.value)
    if kind == "odd":
        assert called.value.extra == [1]
    assert not dispatcher_of(fast).entries


def test_a_capture_that_fails_leaves_the_signature_in_the_findings():
    def fail(model, args, kwargs, earlier):
        raise StopIteration

    model = Scores().eval()
    fast = optimized(model, fail, Config())
    fast(torch.rand(2, 3))
    (findings,) = dispatcher_of(fast).findings
    assert "StopIteration" in findings.eager_reason and "capture" in findings.eager_reason
    assert findings.signature == "float32[2, 3]; eval"


class Pair(nn.Module):
    """Stores a result, the same once more, its input, its weight and numbers, and a buffer that it may have read."""

    def __init__(self, reads):
        super().__init__()
        self.inner, self.reads = Scores(), reads
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        scores = self.inner(x)
        self.kept = {"result": scores, "parts": (self.inner.scores, x, self.inner.weight.weight, x.shape[1], 2.5)}
        result = scores + self.mean if self.reads else scores * 2
        self.mean = scores.mean(0)
        return result


def test_a_replay_s_results_are_stored_behind_it():
    model = Pair(reads=False)
    with torch.no_grad():
        (entry,) = dispatcher_of(fxopt.optimize(model, torch.rand(5, 3), Config(tune="off"))).entries
    stores = Stores(entry.executable)
    assert not stores.executable.graph.graph.find_nodes(op="call_module")
    placeholders = entry.executable.graph.graph.find_nodes(op="placeholder")
    x, state = torch.rand(4, 3), [node.meta["tensor"]() for node in placeholders[:-1]]
    model.kept = model.mean = model.inner.scores = None
    found = stores.put(stores.executable.graph(*state, x), state, [x])
    kept, mean, scores = model.kept, model.mean, model.inner.scores
    expected = Pair.forward(model, x)
    assert_same(entry.rebuild(found), expected)
    assert_same(
        (kept["result"], kept["parts"], mean, scores),
        (model.kept["result"], model.kept["parts"], model.mean, model.inner.scores),
    )
    assert kept["parts"][0] is scores and kept["parts"][1] is x and kept["parts"][2] is model.inner.weight.weight


def test_a_buffer_that_is_read_and_replaced_keeps_a_call_from_replays():
    with torch.no_grad():
        (entry,) = dispatcher_of(fxopt.optimize(Pair(reads=True), torch.rand(5, 3), Config(tune="off"))).entries
    with pytest.raises(NoGraph, match="'mean' at each call, a buffer that it reads"):
        Stores(entry.executable)
