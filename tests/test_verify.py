"""Verification accepts reordered arithmetic, and rejects what is wrong, by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture import capture
from fxopt.config import Config
from fxopt.runtime import Executable
from fxopt.verify import Verdict, bisect, verify
from tests.runtime.models import Tower, tower_inputs

FULL = Config(verify="full")
FIRST = Config(verify="first")


def judge(model, inputs, change=None, config=FULL, kwargs=None):
    """Verify the captured graph after `change(graph)` edited it, or with `change` as a wrapper of run."""
    captured = capture(model, inputs, kwargs or {})
    baseline = captured.graph
    edited = copy.deepcopy(baseline)
    if change is not None:
        change(edited)
        edited.recompile()
    return verify(Executable(captured, edited.forward), baseline, model, inputs, kwargs or {}, config)


def wrapped(model, inputs, wrap, config=FULL):
    captured = capture(model, inputs)

    def run(*tensors):
        return wrap(captured.graph.forward, *tensors)

    return verify(Executable(captured, run), captured.graph, model, inputs, {}, config)


def snapshot(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("config", [FIRST, FULL])
def test_an_unchanged_graph_passes_and_leaves_no_trace(training, config):
    model = Tower().train(training)
    before = snapshot(model)
    verdict = judge(model, tower_inputs(), config=config)
    assert verdict == Verdict(True, 0.0)
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert model.training == training


def test_rng_is_left_alone():
    model, inputs = Tower(), tower_inputs()
    captured = capture(model, inputs)
    rng = torch.get_rng_state()
    verify(Executable(captured, captured.graph.forward), captured.graph, model, inputs, {}, FULL)
    assert torch.equal(rng, torch.get_rng_state())


class Dot(nn.Module):
    """A long dot product with cancellation: a reordered sum differs by many eps of the result."""

    def __init__(self, n=2000):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))

    def forward(self, x):
        return (x * self.w).sum(-1)


@pytest.mark.parametrize("batch", [1, 5, 200])
@pytest.mark.parametrize("seed", range(5))
def test_reordered_sums_pass(batch, seed):
    torch.manual_seed(seed)
    model = Dot().eval()
    order = torch.randperm(2000)

    def reordered(run, w, x):
        return (torch.stack([(x * w)[:, o].sum(-1) for o in order.chunk(7)]).sum(0),)

    verdict = wrapped(model, (torch.randn(batch, 2000),), reordered)
    assert verdict.ok, verdict.message
    assert verdict.max_error < 1e-3


@torch.library.custom_op("fxopt_tests::of_floats", mutates_args=())
def of_floats(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise NotImplementedError("'of_floats' is not implemented for 'Double'")
    return x * 3


of_floats.register_fake(torch.empty_like)
of_floats.register_autograd(lambda ctx, gradient: 3 * gradient)


class OfFloats(Dot):
    def forward(self, x):
        return super().forward(torch.ops.fxopt_tests.of_floats(x))


@pytest.mark.parametrize(("add", "passes"), [(0.0, True), (1e-2, False)])
def test_an_operator_without_float64_has_a_reference_of_rounded_values(add, passes):
    torch.manual_seed(0)
    order = torch.randperm(2000)

    def reordered(run, w, x):
        return ((3 * x * w)[:, order].sum(-1) + add,)

    verdict = wrapped(OfFloats().eval(), (torch.randn(50, 2000),), reordered)
    assert verdict.ok is passes, verdict.message
    assert passes or "fp64 says" in verdict.message


def test_lower_precision_fails():
    torch.manual_seed(0)

    def half(run, w, x):
        return ((x.bfloat16() * w.bfloat16()).sum(-1).float(),)

    verdict = wrapped(Dot(), (torch.randn(8, 2000),), half)
    assert not verdict.ok and verdict.capture_ok
    assert "output 0" in verdict.message and "budget" in verdict.message


WRONG = {
    "a value": (lambda out: out + 1e-3, "differ, worst at"),
    "one element": (lambda out: out.index_add(0, torch.tensor([2]), torch.full((1, 1), 1e-3)), "worst at [2, 0]"),
    "NaN": (lambda out: torch.where(out > out.median(), torch.nan, out), "NaN"),
    "shape": (lambda out: out.squeeze(1), "shape"),
    "dtype": (lambda out: out.double(), "dtype"),
    "detached": (lambda out: out.detach(), "requires_grad"),
    "strides": (lambda out: out.expand(-1, 2)[:, :1].expand(6, 1).as_strided((6, 1), (0, 1)), "expected"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_outputs_are_named(what):
    change, message = WRONG[what]
    verdict = wrapped(Tower().eval(), tower_inputs(), lambda run, *tensors: (change(run(*tensors)[0]),), FIRST)
    assert not verdict.ok and verdict.capture_ok
    assert verdict.message.startswith("output 0") and message in verdict.message


def test_a_wrong_gradient_is_named():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def run(forward, *tensors):
        return (Double.apply(forward(*tensors)[0]),)

    model, inputs = Tower().eval(), tower_inputs()
    assert wrapped(model, inputs, run, FIRST).ok
    verdict = wrapped(model, inputs, run, FULL)
    assert not verdict.ok and verdict.message.startswith("gradient of ")


def test_other_batch_sizes_are_tried():
    def run(forward, *tensors):
        (out,) = forward(*tensors)
        return (out if out.shape[0] != 3 else out + 1,)

    model, inputs = Tower().eval(), tower_inputs()
    assert wrapped(model, inputs, run, FIRST).ok
    verdict = wrapped(model, inputs, run, FULL)
    assert not verdict.ok and verdict.message.startswith("at batch size 3")


def test_missing_state_updates_are_named():
    def run(forward, *tensors):
        return forward(*(t.detach().clone() if not t.requires_grad else t for t in tensors))

    verdict = wrapped(Tower().train(), tower_inputs(), run, FIRST)
    assert not verdict.ok and "after the call" in verdict.message


def test_mutated_inputs_are_compared_and_kept():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2) + 1

    x = torch.randn(4)
    kept = x.clone()
    assert judge(InPlace(), (x,), config=FIRST).ok
    assert not wrapped(InPlace(), (x,), lambda run, x: (x * 2 + 1,), FIRST).ok
    assert torch.equal(x, kept)


def test_exceptions_must_agree():
    model = Tower().eval()
    dense, ids = tower_inputs()
    good = capture(model, (dense, ids))
    bad = (dense, ids + 100)

    class BadId(IndexError):
        pass

    def fails(*tensors):
        raise BadId("column 0")

    same = verify(Executable(good, good.graph.forward), good.graph, model, bad, {}, FIRST)
    assert same.ok
    assert verify(Executable(good, fails), good.graph, model, bad, {}, FIRST).ok, "a BadId is an IndexError"
    silent = verify(Executable(good, lambda *t: (torch.zeros(6, 1),)), good.graph, model, bad, {}, FIRST)
    assert not silent.ok and "expected IndexError" in silent.message
    broken = verify(Executable(good, fails), good.graph, model, (dense, ids), {}, FIRST)
    assert not broken.ok and "BadId" in broken.message


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("config", [FIRST, FULL])
def test_every_grad_mode(mode, config):
    with mode():
        assert judge(Tower().eval(), tower_inputs(), config=config).ok
        assert not wrapped(Tower().eval(), tower_inputs(), lambda f, *t: (f(*t)[0] + 1,), config).ok


def test_inputs_keep_their_strides():
    packed = torch.randn(5, 6)
    seen = []

    def run(forward, *tensors):
        seen.append(tensors[-2].stride())
        return forward(*tensors)

    assert wrapped(Tower().eval(), (packed[:, ::2], torch.zeros(5, 2, dtype=torch.int64)), run).ok
    assert seen[0] == (6, 2)


def test_a_wrong_capture_is_told_from_a_wrong_rewrite():
    model, inputs = Tower().eval(), tower_inputs()
    captured = capture(model, inputs)
    with torch.no_grad():
        model.scale = 2.0
    verdict = verify(Executable(captured, captured.graph.forward), captured.graph, model, inputs, {}, FIRST)
    assert not verdict.ok and not verdict.capture_ok
    assert "before any rewrite" in verdict.message


class Buckets(nn.Module):
    """Discrete decisions on floats: the reference must take them as eager does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.linspace(0, 1, 101))
        self.table = nn.Embedding(1000, 3)
        self.top = nn.Linear(3, 1)

    def forward(self, x):
        ids = torch.bucketize(x * 0.1 + x * 0.9, self.edges) + (x * 333.33).long()
        return self.top(self.table(ids)).squeeze(-1)


def test_a_wrong_row_is_never_rounding():
    model = Buckets()
    x = torch.rand(300)

    def other_order(run, edges, table, w, b, x):
        ids = torch.bucketize(x * 0.1 + x * 0.9, edges) + (x * 333.33).long()
        return ((table[ids] * w).sum(-1) + b,)

    def one_row_off(run, edges, table, w, b, x):
        ids = torch.bucketize(x * 0.1 + x * 0.9, edges) + (x * 333.33).long()
        ids = torch.where(torch.arange(len(ids)) == 7, ids + 1, ids)
        return ((table[ids] * w).sum(-1) + b,)

    names = [str(slot) for slot in capture(model, (x,)).state]
    assert names == ["edges", "table.weight", "top.weight", "top.bias"] or names
    run = {True: other_order, False: one_row_off}
    order = [names.index(n) for n in ("edges", "table.weight", "top.weight", "top.bias")]
    for ok, wrap in run.items():
        verdict = wrapped(model, (x,), lambda f, *t, wrap=wrap: wrap(f, *(t[i] for i in order), t[-1]), FIRST)
        assert verdict.ok == ok, verdict.message


def test_integers_are_exact():
    class Ids(nn.Module):
        def forward(self, x):
            return (x * 100).long()

    assert judge(Ids(), (torch.rand(50),)).ok
    verdict = wrapped(Ids(), (torch.rand(50),), lambda run, x: ((x * 100).round().long(),), FIRST)
    assert not verdict.ok


@pytest.mark.parametrize("first_bad", [0, 1, 5, 9])
def test_bisect_finds_the_first_bad_rewrite(first_bad):
    tried = []

    def compile_with_fuel(k):
        tried.append(k)
        return Verdict(k <= first_bad)

    assert bisect(compile_with_fuel, 10) == first_bad
    assert len(tried) <= 4


class Bags(nn.Module):
    def __init__(self, mode, padding_idx):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode=mode, padding_idx=padding_idx)
        self.top = nn.Linear(8, 300)

    def forward(self, ids, offsets):
        return self.top(self.bag(ids, offsets)).sum(1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 0, 7, -1])
@pytest.mark.parametrize("config", [FIRST, FULL])
def test_the_reference_of_a_bag_is_the_bag_in_double(mode, padding_idx, config):
    """The sum in reverse order is rounding; the reference, made of the rows in use, must agree with both orders."""
    torch.manual_seed(0)
    model = Bags(mode, padding_idx)
    inputs = (torch.randint(0, 50, (90,)), torch.tensor([0, 0, 30, 31, 60]))
    order = torch.arange(299, -1, -1)

    def reverse(forward, table, w, b, ids, offsets):
        (out,) = forward(table, w[order], b[order], ids, offsets)
        return (out,)

    def wrong(forward, table, w, b, ids, offsets):
        return forward(table, w, b, ids, offsets + (offsets == 31).long())

    assert [str(s) for s in capture(model, inputs).state] == ["bag.weight", "top.weight", "top.bias"]
    right = wrapped(model, inputs, reverse, config)
    assert right.ok, right.message
    assert not wrapped(model, inputs, wrong, config).ok


def test_what_is_made_of_no_float_has_a_reference_too():
    """torch.ones says float32 by default, also where everything else is in double."""

    class Routing(nn.Module):
        def forward(self, x, ids):
            weights = torch.ones(len(x), 3, 40) * torch.arange(3.0)[:, None] + (ids * 0.1)[:, None]
            return torch.bmm(weights.softmax(1), x).sum(1)

    def reorder(graph):
        product = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.bmm.default)
        with graph.graph.inserting_before(product):
            turned = [
                graph.graph.call_function(torch.ops.aten.flip.default, (a, [d]))
                for a, d in zip(product.args, (2, 1), strict=True)
            ]
        product.args = tuple(turned)

    torch.manual_seed(0)
    assert judge(Routing(), (1e3 * torch.randn(5, 40, 6), torch.randint(0, 9, (5, 40))), reorder, FIRST).ok


def test_sparse_constants_have_a_reference_too():
    """NGCF keeps its graph of users and items as a sparse tensor that is no buffer."""

    class Propagated(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.Parameter(1e3 * torch.randn(40, 300))
            self.edges = torch.rand(40, 40).sub(0.5).relu().to_sparse()

        def forward(self, x):
            return x * torch.sparse.mm(self.edges, self.items).sum(1)

    def reorder(graph):
        product = next(node for node in graph.graph.nodes if node.target is torch.ops.aten._sparse_mm.default)
        with graph.graph.inserting_after(product):
            turned = graph.graph.call_function(torch.ops.aten.flip.default, (product, [1]))
        product.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)

    torch.manual_seed(0)
    assert judge(Propagated(), (torch.randn(3, 1),), reorder, FIRST).ok


@pytest.mark.parametrize("is_buffer", [False, True])
def test_products_with_sparse_constants_are_captured(is_buffer):
    """LightGCN writes ``self.edges @ items``, and how its result lies cannot be told from a value."""

    def edges():
        return torch.rand(40, 40).sub(0.5).relu().to_sparse()

    class Propagated(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.Embedding(40, 8)
            if is_buffer:
                self.register_buffer("edges", edges())
            else:
                self.edges = edges()

        def forward(self, ids):
            return (self.items.weight + self.edges @ self.items.weight)[ids]

    model = Propagated()
    fast = fxopt.optimize(model)
    with torch.no_grad():
        for rows in (5, 1):
            ids = torch.randint(0, 40, (rows,))
            torch.testing.assert_close(fast(ids), model(ids))
        assert [entry.executable is not None for entry in fast._fxopt.entries] == [True]
        model.edges.mul_(2)
        torch.testing.assert_close(fast(ids), model(ids))
        model.edges = edges()
        torch.testing.assert_close(fast(ids), model(ids))
        model.load_state_dict({**model.state_dict(), "items.weight": torch.randn(40, 8)})
        torch.testing.assert_close(fast(ids), model(ids))
        if is_buffer:
            torch.testing.assert_close(copy.deepcopy(fast).double()(ids), copy.deepcopy(model).double()(ids))


def test_text_of_a_size_is_that_of_the_call():
    """A trace would write the name of a symbol there."""

    class Told(nn.Module):
        def forward(self, x):
            return x * 2, f"{len(x)} rows", len(x)

    fast, model = fxopt.optimize(Told()), Told()
    for rows in (4, 3):
        x = torch.randn(rows, 3)
        assert fast(x)[1:] == model(x)[1:]
    assert [entry.executable is not None for entry in fast._fxopt.entries] == [True, True]


class Loss(nn.Module):
    """A difference of large numbers, and the loss of labels that no perturbation may move above 1."""

    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x, labels):
        y = (self.score(x * 1e6) - self.score(x * 1.0000001e6) * 1.0000001).squeeze(1)
        return y, nn.functional.binary_cross_entropy(y.sigmoid(), labels)


def test_an_operator_that_refuses_perturbed_inputs_excuses_nothing():
    torch.manual_seed(0)
    model, inputs = Loss(), (torch.randn(32, 64), torch.rand(32).round())
    fast = fxopt.optimize(model, inputs, Config(tune="off"))
    (found,) = fast._fxopt.findings
    assert not found.eager_reason
    torch.testing.assert_close(fast(*inputs)[1], model(*inputs)[1], rtol=1e-2, atol=0)


GLOBAL = torch.tensor([0.0])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "make",
    [torch.FloatTensor, torch.tensor, torch.Tensor, lambda numbers: torch.zeros(1), lambda numbers: GLOBAL.clone()],
)
def test_sums_that_begin_as_literals(make, gradients):
    """`loss = torch.tensor([0.0])`, to which a forward adds in place, and which it returns."""

    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x, loss, kept = self.linear(x), make([0.0]), []
            for _ in range(2):
                x = torch.softmax(x, 1)
                loss += x.square().sum()
                kept.append(x)
            loss /= 2
            return kept, loss

    model, x = Summing(), torch.randn(5, 4)
    fast = fxopt.optimize(copy.deepcopy(model), x)
    found = []
    for each in (model, fast):
        with torch.set_grad_enabled(gradients):
            rows, loss = each(x)
        assert loss.requires_grad == gradients
        found.append(
            [*rows, loss, *(torch.autograd.grad(loss + rows[1].sum(), each.parameters()) if gradients else ())]
        )
    torch.testing.assert_close(*found)
    assert not fast._fxopt.findings[-1].eager_reason
    assert not GLOBAL.any()


def test_a_global_that_a_forward_adds_to_is_no_literal():
    class Counting(nn.Module):
        def forward(self, x):
            GLOBAL.add_(x.sum())
            return GLOBAL * 1, GLOBAL

    try:
        fast, x = fxopt.optimize(Counting(), torch.ones(3)), torch.ones(3)
        assert not GLOBAL.any()
        for call in (1, 2):
            first, second = fast(x)
            assert float(first) == float(second) == 3 * call
    finally:
        GLOBAL.zero_()
