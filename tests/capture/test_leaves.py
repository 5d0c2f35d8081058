"""What stops a capture stays opaque, and the rest of the model is captured around it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import CaptureError, LeafCall, LeafMismatch, capture
from fxopt.config import Config
from fxopt.runtime import dispatcher_of


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.inner = inner
        self.after = nn.Linear(4, 2)

    def forward(self, x, *rest):
        return self.after(self.inner(self.before(x).relu(), *rest)) + x.shape[0]


class DataBranch(nn.Module):
    def forward(self, x):
        if float(x.sum()) > 0:
            return x * 2
        return -x


class Numpy(nn.Module):
    def forward(self, x):
        return x * float(x.detach().numpy().mean())


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class History(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return x * 2


def leaf_calls(found) -> list[str]:
    return [n.target for n in found.graph.graph.nodes if n.op == "call_module"]


@pytest.mark.parametrize("example", [1, 8])
@pytest.mark.parametrize("inner", [DataBranch, Numpy])
def test_what_depends_on_data_becomes_a_leaf(check, inner, example):
    model = Wrapped(inner()).requires_grad_(False)
    found = capture(model, (torch.rand(example, 3),))
    assert [leaf.path for leaf in found.leaves] == ["inner"]
    assert found.leaves[0].place.line.startswith("test_leaves.py:")
    (name,) = leaf_calls(found)
    call = found.graph.get_submodule(name)
    assert isinstance(call, LeafCall) and call.module is model.inner
    assert sum("linear" in str(n.target) for n in found.graph.graph.nodes) == 2
    for batch in (1, 2, 7):
        check(found, model, torch.randn(batch, 3))


def test_the_root_is_no_leaf():
    with pytest.raises(CaptureError, match=r"test_leaves.py:\d+.*if float\(x.sum\(\)\) > 0:.*depends on data"):
        capture(DataBranch(), (torch.rand(4),))


def test_code_without_a_module_stops_as_any_other() -> None:
    space: dict[str, object] = {}
    exec("def forward(self, x):\n    return x * 2 if x[x > 0].shape[0] > 2 else x", space)
    del space["__builtins__"]
    (taken,) = capture(type("Made", (nn.Module,), space)(), (torch.randn(3),)).taken
    assert "for the answer no" in taken.reason


def test_leaves_named_by_the_user(check):
    model = Wrapped(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    found = capture(model, (torch.rand(4, 3),), config=Config(leaves=("inner",)))
    assert len(leaf_calls(found)) == 1
    check(found, model, torch.rand(6, 3))
    with pytest.raises(ValueError, match="missing"):
        capture(model, (torch.rand(4, 3),), config=Config(leaves=("missing",)))


def test_hooks_make_a_leaf_and_run(check):
    model = Wrapped(nn.Linear(4, 4))
    model.inner.register_forward_hook(lambda module, args, out: out * 2)
    found = capture(model, (torch.rand(4, 3),))
    assert [leaf.reason for leaf in found.leaves] == ["has forward or backward hooks"]
    check(found, model, torch.rand(6, 3))


@pytest.mark.parametrize("inner", [Counter, History])
def test_attributes_that_carry_values_make_a_leaf(inner):
    model, twin = Wrapped(inner()), Wrapped(inner())
    twin.load_state_dict(model.state_dict())
    found = capture(model, (torch.rand(4, 3),))
    assert [leaf.path for leaf in found.leaves] == ["inner"]
    assert next(iter(vars(inner()).keys() - vars(nn.Module()).keys())) in found.leaves[0].reason
    assert not getattr(model.inner, "calls", 0) and not getattr(model.inner, "seen", [])
    for batch in (5, 6):
        x = torch.rand(batch, 3)
        (got,) = found.graph(*[slot.read(model) for slot in found.state], x)
        torch.testing.assert_close(got, twin(x))
    with pytest.raises(CaptureError, match=r"calls|seen"):
        capture(inner(), (torch.rand(4, 3),))


def test_attributes_that_are_only_written_are_stored(check):
    class Attention(nn.Module):
        def forward(self, x):
            self.scores = torch.softmax(x, -1)
            return x * self.scores

    model = Wrapped(Attention())
    found = capture(model, (torch.rand(4, 3),))
    assert not found.leaves and not hasattr(model.inner, "scores")
    found.graph.graph.eliminate_dead_code()
    x = torch.rand(6, 3)
    check(found, model, x)
    assert model.inner.scores.shape == (6, 4)


def test_an_attribute_of_a_leaf_read_outside_stops_the_capture():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counter()

        def forward(self, x):
            return self.counter(x) + self.counter.calls

    with pytest.raises(CaptureError, match="calls"):
        capture(Reader(), (torch.rand(4),))


def test_a_leaf_that_returns_another_size_says_so():
    class Unique(nn.Module):
        def forward(self, x):
            return x[: max(1, int(x.sum()))] if float(x.sum()) > 0 else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.unique = Unique()

        def forward(self, x):
            return self.unique(x) * 2

    model = Model()
    found = capture(model, (torch.ones(4),))
    with pytest.raises(LeafMismatch, match="unique"):
        found.graph(torch.full((4,), 0.5))


class Halves(nn.Module):
    """Ids as a KeyedJaggedTensor has them, all of the first feature and then all of the second: [2 B] to [B, 2]."""

    def forward(self, ids):
        return ids.view(2, ids.numel() // 2).t().float().tanh()


def test_a_size_that_is_no_arguments_is_a_symbol_of_its_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves, self.dense = Halves(), nn.Linear(2 + 3, 50)

        def forward(self, x, ids):
            return self.dense(torch.cat([self.halves(ids), x], 1)).relu()

    model = Model()
    model.halves.register_forward_hook(lambda module, args, result: result)
    fast = fxopt.optimize(model)
    for size in (11, 1, 7, 64):
        inputs = torch.randn(size, 3), torch.randint(9, (2 * size,))
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    (found,) = dispatcher_of(fast).findings
    assert found.operators_before and [leaf.path for leaf in dispatcher_of(fast).entries[0].executable.capture.leaves]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        fast(torch.randn(3, 3), torch.randint(9, (8,)))


def test_a_leaf_runs_under_the_autocast_of_its_call(check):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = DataBranch()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.branch(x @ x.t() @ x)
            return y + x

    model = Auto()
    found = capture(model, (torch.rand(4, 3),))
    assert [leaf.path for leaf in found.leaves] == ["branch"]
    assert not torch.is_autocast_enabled("cpu")
    check(found, model, torch.rand(6, 3))


def test_a_leaf_may_be_called_twice(check):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = DataBranch()

        def forward(self, x):
            return self.branch(x) + self.branch(-x)

    model = Twice()
    found = capture(model, (torch.rand(4, 3),))
    assert len(leaf_calls(found)) == 2
    check(found, model, torch.randn(6, 3))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Reversal(nn.Module):
    def forward(self, x):
        return Reverse.apply(x)


def test_an_autograd_function_keeps_its_backward():
    model = Wrapped(Reversal())
    found = capture(model, (torch.rand(4, 3),))
    x = torch.rand(5, 3)
    model(x).sum().backward()
    want = model.before.weight.grad.clone()
    model.zero_grad()
    found.graph(*[slot.read(model) for slot in found.state], x)[0].sum().backward()
    torch.testing.assert_close(model.before.weight.grad, want)
    with torch.no_grad():
        assert not capture(model, (x,)).leaves


def test_a_gradient_hook_in_the_forward_makes_a_leaf():
    class Hooked(nn.Module):
        def forward(self, x):
            y = x * 2
            y.register_hook(lambda grad: grad * 0)
            return y

    assert [leaf.path for leaf in capture(Wrapped(Hooked()), (torch.rand(4, 3),)).leaves] == ["inner"]


def test_torchscript_and_unusual_state_make_leaves(check):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.eye(4).to_sparse())

        def forward(self, x):
            return (self.matrix @ x.t()).t()

    for inner in (torch.jit.script(nn.Linear(4, 4)), Sparse()):
        model = Wrapped(inner)
        found = capture(model, (torch.rand(4, 3),))
        assert [leaf.path for leaf in found.leaves] == ["inner"]
        check(found, model, torch.rand(6, 3))


def test_torchscript_with_submodules_is_a_leaf():
    model = Wrapped(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    x = torch.randn(5, 3)
    torch.testing.assert_close(fxopt.optimize(model)(x), model(x))


def test_python_random_numbers_stop_the_capture():
    class Random(nn.Module):
        def forward(self, x):
            return x * random.random()

    with pytest.raises(CaptureError, match="random"):
        capture(Random(), (torch.rand(4, 3),))


class Drawing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.generator = how, torch.Generator()

    def forward(self, x):
        if self.how == "seed":
            torch.manual_seed(3)
        elif self.how == "fork":
            with torch.random.fork_rng():
                return x + torch.rand(3)
        elif self.how == "inference":
            with torch.inference_mode():
                return x + 1
        return x + torch.rand(3, generator=self.generator.manual_seed(3) if self.how == "generator" else None)


@pytest.mark.parametrize("how", ["seed", "fork", "generator", "inference"])
def test_random_states_and_modes_that_a_graph_does_not_set_stop_the_capture(how):
    with pytest.raises(CaptureError, match=r"random state|generator|inference mode"):
        capture(Drawing(how), (torch.rand(3),))
    assert torch.equal(torch.get_rng_state(), torch.default_generator.get_state())


class Editing(nn.Module):
    def forward(self, x):
        if float(x.sum()) > 1e9:
            return x
        x.add_(1)
        return x * 2


EDITED = {
    "a copy made before": lambda m, a: (a.clone(), m.inner(a), a * 2),
    "x + 0": lambda m, a: (a + 0, m.inner(a), a * 2),
    "a cat's pieces": lambda m, a: (z := torch.cat([a, a * 3], 1), m.inner(z), z[:, :3] * 2, z[:, 3:] * 2, a * 2)[1:],
    "a duplicate": lambda m, a: (y := a.exp(), m.inner(y), a.exp() * 2)[1:],
    "a duplicate constant": lambda m, a: (m.inner(torch.zeros(3)), a + torch.zeros(3)),
    "an input": lambda m, a: (a * 2, m.inner(m.x), m.x * 2, m.inner(a[:, 1:]), a * 2),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EDITED)
def test_what_a_leaf_edits_is_edited(name, mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Editing()
            self.x = torch.ones(2, 3)

        def forward(self, x):
            return [y for y in EDITED[name](self, x * 0.5) if y is not None]

    model = Model()
    with mode():
        fast = fxopt.optimize(model, (torch.rand(2, 3),), fxopt.Config(verify="off"))
        assert fast._fxopt.entries[0].executable is not None
        x, state = torch.rand(2, 3), model.x.clone()
        expected = model(x)
        model.x.copy_(state)
        assert all(map(torch.equal, fast(x), expected))


def test_a_look_edits_no_constant_of_an_opaque_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.x = Editing(), torch.ones(2, 3)

        def forward(self, x):
            return self.inner(self.x), self.x * x, self.inner(x * 0.5)

    model, twin, x = Model(), Model(), torch.rand(2, 3)
    fast = fxopt.optimize(model, (x,))
    assert torch.equal(model.x, twin.x)
    assert all(map(torch.equal, fast(x), twin(x)))
    assert torch.equal(model.x, twin.x)


def test_function_transforms_make_a_leaf(check):
    class Mapped(nn.Module):
        def forward(self, x):
            return torch.vmap(lambda row: row * row.sum())(x)

    model = Wrapped(Mapped())
    found = capture(model, (torch.rand(4, 3),))
    assert [leaf.path for leaf in found.leaves] == ["inner"]
    check(found, model, torch.rand(6, 3))


def test_recurrent_modules(check):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            out, hidden = self.gru(x)
            return out[:, -1] + hidden[0]

    model = Last()
    found = capture(model, (torch.rand(1, 5, 3),))
    for batch in (1, 2, 7):
        check(found, model, torch.rand(batch, 5, 3))


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
            return torch.sin(x) * x


def test_hooks_around_what_is_saved_stay():
    model = nn.Sequential(nn.Linear(4, 8), Saving(), nn.Linear(8, 2))
    fast, x = fxopt.optimize(model), torch.randn(5, 4)
    found, expected = [], []
    for each, gradients in ((fast, found), (model, expected)):
        model.zero_grad()
        each(x).sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    torch.testing.assert_close(found, expected)
