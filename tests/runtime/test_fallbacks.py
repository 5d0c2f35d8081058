"""Calls that no capture serves run as eager: same answers, same exceptions."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import fxopt
from fxopt.config import Config
from fxopt.runtime import Executable, dispatcher_of, optimized
from fxopt.runtime.attempts import Attempts
from fxopt.runtime.dispatch import _MANY
from fxopt.runtime.entry import REFUSED
from tests.runtime.models import Recorder, Tower, assert_same, optimize, tower_inputs


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
        return x + 1 if float(x.sum()) > 0 else x - 1


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
    def compile(model, args, kwargs, earlier):
        recorded = Recorder()(model, args, kwargs, earlier)

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


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, ids, scale):
        return self.table(ids) * scale


def test_an_error_keeps_nothing_alive():
    fast = fxopt.optimize(Lookup().requires_grad_(False))
    fast(torch.arange(3), torch.ones(3, 2))
    scale = torch.ones(3, 2)
    kept = weakref.ref(scale)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(IndexError) as raised:
                fast(torch.tensor([1, 9, 2]), scale)
            del raised
        del scale
        assert kept() is None
    finally:
        gc.enable()


def test_a_graph_that_fails_where_eager_does_not_is_dropped():
    def compile(model, args, kwargs, earlier):
        def run(*tensors):
            raise RuntimeError("kernel broke")

        return Executable(Recorder()(model, args, kwargs, earlier).capture, run)

    model = Tower().eval()
    fast = optimized(model, compile)
    inputs = tower_inputs()
    for _ in range(3):
        assert_same(fast(*inputs), model(*inputs))
    (findings,) = dispatcher_of(fast).findings
    assert "kernel broke" in findings.eager_reason


_OPAQUE = Config(leaves=("pooling",), tune="off", verify="off")


class Pooling(nn.Module):
    """The sum of each bag. values [N], offsets [B] to [B]."""

    def forward(self, values, offsets):
        bounds = [*offsets.tolist(), len(values)]
        return torch.stack([values[a:b].sum() for a, b in pairwise(bounds)])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pooling, self.head = Pooling(), nn.Linear(1, 3)

    def forward(self, values, offsets):
        return self.head(self.pooling(values, offsets)[:, None]).relu()


def test_a_leaf_whose_sizes_its_trial_run_did_not_tell_is_captured_again():
    model = Pooled()
    fast = fxopt.optimize(model, config=_OPAQUE)
    one, bags = (torch.randn(1), torch.tensor([0])), (torch.randn(5), torch.tensor([0, 2, 2]))
    for inputs in (one, bags, bags, one):
        assert_same(fast(*inputs), model(*inputs))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None


def test_leaves_whose_sizes_nothing_tells_stay_eager_in_the_end():
    class Filtered(nn.Module):
        def forward(self, values, offsets):
            return values[values > 0] if float(values.sum()) > 0 else values

    model = Pooled()
    model.pooling = Filtered()
    fast = fxopt.optimize(model, config=_OPAQUE)
    for kept in (4, 3, 4, 2, 4, 1, 4, 3):
        inputs = torch.tensor([1.0] * kept + [-0.1] * (4 - kept)), torch.tensor([0])
        assert_same(fast(*inputs), model(*inputs))
    assert len(dispatcher_of(fast).entries) == 1


def test_a_compile_that_fails_leaves_the_model_eager():
    def compile(model, args, kwargs, earlier):
        raise KeyError("a bug")

    model = Tower().eval()
    fast = optimized(model, compile)
    inputs = tower_inputs()
    assert_same(fast(*inputs), model(*inputs))
    assert "a bug" in dispatcher_of(fast).findings[0].eager_reason


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


def test_a_nested_tensor_stays_eager():
    """torch's own fast path gives them to the layers of a transformer, which may be parts of an optimized model."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    fast = fxopt.optimize(copy.deepcopy(layer))
    with torch.no_grad():
        for given, wanted in zip(fast(rows).unbind(), layer(rows).unbind(), strict=True):
            torch.testing.assert_close(given, wanted)


class Tolerant(nn.Module):
    """Has an answer for ids that nobody knows."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(20))

    def forward(self, ids):
        try:
            return torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        except IndexError:
            return torch.zeros(len(ids), 80)


def test_the_graph_stays_where_the_model_catches_a_bad_id():
    model = Tolerant()
    fast = fxopt.optimize(model, config=Config(tune="off"))
    good, bad = torch.randint(0, 20, (5, 20)), torch.full((5, 20), 99)
    for inputs in (good, *(bad, bad, good) * REFUSED):
        assert_same(fast(inputs), model(inputs))
    assert dispatcher_of(fast).entries[0].executable is not None
    for _ in range(REFUSED):
        assert_same(fast(bad), model(bad))
    assert f"in {REFUSED} calls in a row" in dispatcher_of(fast).findings[0].eager_reason


@pytest.mark.parametrize("offsets", [[0, 4, 3, 5], [0, 2, 30, 5]])
def test_offsets_by_which_eager_would_read_outside_raise_and_the_graph_stays(offsets):
    class Bags(nn.ModuleList):
        def forward(self, ids, starts):
            return torch.cat([bag(ids, starts) for bag in self], 1)

    model = Bags(nn.EmbeddingBag(30, 4, mode="sum") for _ in range(20))
    fast, ids = fxopt.optimize(model, config=Config(tune="off")), torch.randint(0, 30, (8,))
    good = ids, torch.tensor([0, 2, 3, 5])
    assert_same(fast(*good), model(*good))
    with pytest.raises(RuntimeError, match=r"offsets of bag 1 are .* within 8 ids"):
        fast(ids, torch.tensor(offsets))
    with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):  # eager's own
        fast(ids, torch.tensor([1, 2, 3, 5]))
    assert_same(fast(*good), model(*good))
    assert dispatcher_of(fast).entries[0].executable is not None


def test_arguments_of_unknown_classes_are_looked_at_now_and_then(monkeypatch):
    """A look takes 300 us (RecBole's Interaction)."""
    looks, refusal = [], Attempts.refusal
    monkeypatch.setattr(Attempts, "refusal", lambda *args: looks.append(args) or refusal(*args))

    class Rows:
        def __init__(self, x):
            self.x = x

    class Model(nn.Module):
        def forward(self, rows):
            return rows.x * 2

    model = Model()
    fast, rows = fxopt.optimize(model), Rows(torch.randn(3))
    for _ in range(2 * _MANY):
        assert_same(fast(rows), model(rows))
    assert _MANY < len(looks) < _MANY + 8
    (findings,) = dispatcher_of(fast).findings
    assert "Rows (torch.utils._pytree.register_pytree_node" in findings.eager_reason
