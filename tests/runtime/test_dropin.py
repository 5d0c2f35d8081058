"""The optimized model is the model: same state, same attributes, same life cycle."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fxopt.runtime import dispatcher_of, optimized
from tests.runtime.models import Recorder, Tower, assert_same, optimize, tower_inputs


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Tower().eval()
    fast, recorder = optimize(model)
    return model, fast, recorder


def check(model, fast, recorder, captured=True):
    """The answer is eager's, and came from the graph (or, captured=False, from eager)."""
    inputs, runs = tower_inputs(), recorder.runs
    with torch.no_grad():
        assert_same(fast(*inputs), type(model).forward(model, *inputs))
    assert (recorder.runs > runs) == captured


def test_state_is_the_same_objects(pair):
    model, fast, _ = pair
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    assert isinstance(fast, Tower)
    assert type(fast).__name__ == "OptimizedTower"
    assert fast.forward.__doc__ == model.forward.__doc__


def test_strict_load_and_assign(pair):
    _, fast, recorder = pair
    check(*pair)
    for assign in (False, True):
        other = Tower()
        assert not fast.load_state_dict(other.state_dict(), strict=True, assign=assign).missing_keys
        check(*pair)
        with torch.no_grad():
            inputs = tower_inputs()
            assert_same(fast(*inputs), other.eval()(*inputs))
    assert recorder.captures == 1


def test_optimizer_steps_match_eager():
    torch.manual_seed(1)
    model, twin = Tower(), None
    twin = copy.deepcopy(model)
    fast, recorder = optimize(model)
    steppers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (fast, twin)]
    for step in range(4):
        inputs = tower_inputs(8 + step)
        for m, stepper in zip((fast, twin), steppers, strict=True):
            torch.manual_seed(step)
            stepper.zero_grad()
            m(*inputs).square().mean().backward()
            stepper.step()
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert_same(a, b), name
    assert recorder.captures == 1 and recorder.runs == 4


def test_gradients_reach_every_parameter_and_input(pair):
    model, fast, recorder = pair
    dense, ids = tower_inputs()
    grads = []
    for m in (model, fast):
        x = dense.clone().requires_grad_()
        model.zero_grad()
        m(x, ids).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    assert len(grads[0]) == 1 + len(list(model.parameters()))
    for eager, ours in zip(*grads, strict=True):
        assert_same(eager, ours)
    assert recorder.runs == 1


def test_weight_edits_take_effect(pair):
    model, fast, recorder = pair
    check(*pair)
    with torch.no_grad():
        model.top.weight.mul_(2)
    check(*pair)
    fast.top.bias.data.fill_(5.0)
    check(*pair)
    fast.tables[0].weight = nn.Parameter(torch.randn(11, 4))
    check(*pair)
    assert recorder.captures == 1


def test_to_dtype_and_new_shapes_recapture(pair):
    model, fast, recorder = pair
    check(*pair)
    assert fast.to(torch.float64) is fast
    dense, ids = tower_inputs()
    with torch.no_grad():
        out = fast(dense.double(), ids)
        assert out.dtype == torch.float64
        assert_same(out, model(dense.double(), ids))
    assert recorder.captures == 2
    fast.float()
    check(*pair)
    assert recorder.captures == 2
    model.tables[0].weight = nn.Parameter(torch.randn(20, 4))
    inputs = (dense, ids + 9 * torch.tensor([1, 0]))
    with torch.no_grad():
        assert_same(fast(*inputs), model(*inputs))
    assert recorder.captures == 3
    model.tables[1].weight.data = torch.randn(30, 4)
    check(*pair)
    assert recorder.captures == 4


def test_modes_are_captures(pair):
    model, fast, recorder = pair
    check(*pair)
    fast.train()
    assert model.training
    inputs = tower_inputs()
    twin = copy.deepcopy(model)
    outs = []
    for m in (fast, twin):
        torch.manual_seed(3)
        outs.append(m(*inputs))
    assert_same(*outs)
    assert_same(model.norm.running_mean, twin.norm.running_mean)
    assert model.norm.num_batches_tracked == 1
    assert recorder.captures == 2
    fast.drop.eval()
    fast.norm.eval()
    check(*pair)
    assert recorder.captures == 3
    fast.eval()
    check(*pair)
    assert recorder.captures == 3


def test_attributes_and_methods(pair):
    model, fast, recorder = pair
    check(*pair)
    fast.scale = 3.0
    assert model.scale == 3.0
    check(*pair)
    model.scale = -1.0
    check(*pair)
    assert recorder.captures == 3
    model.scale = float("-1.0")
    check(*pair)
    assert recorder.captures == 3
    fast.note = "new attribute"
    check(*pair)
    assert_same(fast.embed(torch.tensor([1])), model.embed(torch.tensor([1])))
    with pytest.raises(AttributeError, match="nothing_here"):
        fast.nothing_here  # noqa: B018


def test_replaced_submodule_and_dropout_rate(pair):
    model, fast, recorder = pair
    check(*pair)
    fast.top = nn.Linear(11, 1)
    check(*pair)
    model.tables[1] = nn.Embedding(11, 4)
    check(*pair)
    assert recorder.captures == 3
    assert len(dispatcher_of(fast).entries) == 1, "captures of modules that are gone are dropped"
    fast.drop.train()
    outs = []
    inputs = tower_inputs()
    for p in (0.5, 0.9):
        fast.drop.p = p
        torch.manual_seed(0)
        ours = fast(*inputs)
        torch.manual_seed(0)
        assert_same(ours, model(*inputs))
        outs.append(ours)
    assert not torch.equal(*outs)


class Tied(nn.Module):
    """One tensor under two names, and once more in a list."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.table.weight
        self.listed = [[self.table.weight]]

    def forward(self, ids):
        return self.out(self.table(ids)) + self.listed[0][0].sum()


def test_tied_weights_may_be_untied():
    model = Tied()
    fast, recorder = optimize(model)
    ids = torch.tensor([0, 4, 2])
    with torch.no_grad():
        assert_same(fast(ids), model(ids))
        model.table.weight.add_(1)
        assert_same(fast(ids), model(ids))
        assert recorder.captures == 1
        for owner in (model.out, model.table):
            owner.weight = nn.Parameter(torch.randn(5, 3))
            assert_same(fast(ids), model(ids))
        model.listed[0][0] = torch.ones(2)
        assert_same(fast(ids), model(ids))
        model.listed[0].pop()
        model.listed[0].append(model.table.weight)
        assert_same(fast(ids), model(ids))
        model.listed = [[model.table.weight]]
        assert_same(fast(ids), model(ids))
    assert recorder.runs >= 6


def test_functional_call_and_parametrization(pair):
    model, fast, recorder = pair
    check(*pair)
    inputs = tower_inputs()
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, doubled, inputs)
        runs = recorder.runs
        assert_same(torch.func.functional_call(fast, doubled, inputs), expected)
        assert recorder.runs == runs + 1
        assert not torch.equal(expected, fast(*inputs))

    class Negated(nn.Module):
        def forward(self, weight):
            return -weight

    parametrize.register_parametrization(model.top, "weight", Negated())
    check(*pair)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_duplicates_are_independent(pair, duplicate):
    model, fast, _ = pair
    check(*pair)
    twin = duplicate(fast)
    assert type(twin) is type(fast)
    original = dispatcher_of(twin).original
    assert type(original) is Tower and original is not model
    with torch.no_grad():
        twin.top.weight.add_(1)
    inputs = tower_inputs()
    with torch.no_grad():
        assert_same(twin(*inputs), original(*inputs))
        assert not torch.equal(twin(*inputs), fast(*inputs))
    assert dispatcher_of(twin).compile.runs >= 2


def test_copy_shares_tensors(pair):
    _, fast, _ = pair
    twin = copy.copy(fast)
    assert twin is not fast and twin.top.weight is fast.top.weight
    twin.extra = 1
    assert not hasattr(fast, "extra")


def test_torch_save_and_load(pair):
    model, fast, _ = pair
    check(*pair)
    file = io.BytesIO()
    torch.save(fast, file)
    assert b"OptimizedTower" not in file.getvalue(), "the file must not need the generated class"
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    inputs = tower_inputs()
    with torch.no_grad():
        assert_same(loaded(*inputs), model(*inputs))
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    Tower().load_state_dict(torch.load(file, weights_only=True), strict=True)


def test_a_forward_set_on_the_instance_is_the_users(pair):
    model, fast, _ = pair
    check(*pair)
    model.forward = lambda dense, ids: dense + 41
    dense, ids = tower_inputs()
    assert_same(fast(dense, ids), dense + 41)
    del model.forward
    check(*pair)


def test_optimizing_twice_and_type_errors(pair):
    model, fast, _ = pair
    again, recorder = optimize(fast)
    assert type(again) is type(fast)
    check(model, again, recorder)
    with pytest.raises(TypeError, match="before scripting"):
        optimized(torch.jit.script(nn.Linear(2, 2)), Recorder())
    with pytest.raises(TypeError, match="found function"):
        optimized(lambda x: x, Recorder())


def test_root_hooks_run_around_the_graph(pair):
    _, fast, recorder = pair
    seen = []
    fast.register_forward_pre_hook(lambda m, args: seen.append(("pre", m)))
    handle = fast.register_forward_hook(lambda m, args, out: out + 1)
    inputs = tower_inputs()
    with torch.no_grad():
        assert_same(fast(*inputs), fast.forward(*inputs) + 1)
    assert seen == [("pre", fast)]
    assert recorder.runs == 2
    handle.remove()
    check(*pair)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_submodule_hooks_run(pair, kind):
    model, fast, _ = pair
    check(*pair)
    fast(*tower_inputs())  # a capture with gradients on, as below
    seen = []
    handle = getattr(model.top, f"register_{kind}_hook")(lambda *args: seen.append(kind))
    fast(*tower_inputs()).sum().backward()
    assert set(seen) == {kind}, "at the capture the hooked submodule may be tried out"
    before = len(seen)
    for calls in (1, 2):
        fast(*tower_inputs()).sum().backward()
        assert len(seen) == before + calls
    handle.remove()
    check(*pair)
    assert len(seen) == before + 2


def test_original_stays_eager_on_its_own(pair):
    model, fast, recorder = pair
    check(*pair)
    runs = recorder.runs
    model(*tower_inputs())
    assert recorder.runs == runs
    del fast, pair
    model(*tower_inputs())
