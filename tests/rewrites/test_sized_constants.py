"""sized_constants: made once per size, and never when sharing could be noticed."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from fxopt import Config, optimize
from fxopt.patterns.sized_constants import KEPT_BYTES
from fxopt.rewrites import PASSES
from fxopt.rewrites.sized_constants import kept_by_size

aten = torch.ops.aten
ALONE = Config(disable=tuple({ran.name for ran in PASSES} - {"sizes", "sized_constants"}))


class Spelling(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.edges = torch.arange(4.0)  # neither parameter nor buffer
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def graph_of(model: nn.Module) -> Graph:
    return model._fxopt.entries[0].executable.graph.graph


def operators(model: nn.Module) -> list[str]:
    return [n.target._opname for n in graph_of(model).nodes if isinstance(n.target, torch._ops.OpOverload)]


def changes(model: nn.Module) -> list[str]:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason
    assert not any(ran.rolled_back for ran in findings.passes)
    return [change.what for ran in findings.passes if ran.name == "sized_constants" for change in ran.changes]


def miss(model: nn.Module) -> str:
    (findings,) = model._fxopt.findings
    (found,) = (miss for ran in findings.passes for miss in ran.misses if miss.pattern == "sized_constants")
    return found.reason


def check(forward: Callable[..., Tensor]) -> nn.Module:
    """Captured at 6 by 4, run at other batches in turn: eager's values and dtypes from one capture."""
    model = Spelling(forward)
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    for batch in (6, 1, 3, 0, 7, 1, 3):
        x = torch.randn(batch, 4)
        found, expected = fast(x), model(x)
        assert torch.equal(found, expected) and found.dtype == expected.dtype, batch
    assert len(fast._fxopt.entries) == 1
    return fast


# Of these nothing is left to make; the numbers: constants kept per size, and those that are one tensor.
MADE_ONCE: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "zeros": (lambda m, x: m.weight - torch.zeros(x.size(0), 4), 1, 0),
    "static": (lambda m, x: x * m.weight - torch.eye(4)[1], 0, 1),
    "full": (lambda m, x: x * m.weight - torch.full((x.size(0), 1), 0.5), 1, 0),
    "ones_like": (lambda m, x: m.weight - torch.ones_like(x) * 2, 1, 0),
    "full_like with another dtype": (lambda m, x: m.weight - torch.full_like(x, 3, dtype=torch.int64), 1, 0),
    "new_full": (lambda m, x: m.weight - x.new_full((x.size(0), 4), 7), 1, 0),
    "arange": (lambda m, x: m.weight * torch.arange(x.size(0)).unsqueeze(1), 1, 0),
    "arange with a step": (lambda m, x: m.weight * torch.arange(0, 2 * x.size(0), 2).view(-1, 1).float(), 1, 0),
    "mask": (lambda m, x: m.weight * (torch.arange(4)[None] < 2).expand(x.size(0), 4) - 1, 1, 0),
    "static mask": (lambda m, x: x * m.weight * (torch.arange(4)[None] < 2), 0, 1),
    "causal": (lambda m, x: (x @ x.t() * m.weight[0]).masked_fill(_square(x).triu(1) == 1, 0.5), 1, 0),
    "tril": (lambda m, x: (x @ x.t()) * torch.tril(_square(x)) * m.weight[0], 1, 0),
    "linspace": (lambda m, x: torch.bucketize(x * m.weight, torch.linspace(-1, 1, 11)), 0, 1),
    "literal, repeated": (lambda m, x: x * m.weight - torch.tensor([1.0, 2, 3, 4]).repeat(x.size(0), 1), 1, 0),
    "two of one kind": (lambda m, x: torch.ones_like(x) * m.weight + torch.ones_like(x + 1) * m.weight[0], 1, 0),
    "two sizes": (lambda m, x: m.weight - torch.zeros(x.size(0) * 2, x.size(1))[: x.size(0)] - _rows(x), 2, 0),
    "parts of one": (lambda m, x: x * m.weight - torch.arange(8.0).view(2, 4).unbind(0)[1], 0, 1),
    "infinity": (lambda m, x: torch.minimum(x * m.weight, torch.full_like(x, float("inf"))), 1, 0),
    "no-grad in between": (lambda m, x: x * m.weight - _without_grad(x), 1, 0),
}  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    return torch.ones(x.size(0), 1)


def _square(x: Tensor) -> Tensor:
    return torch.ones(x.size(0), x.size(0))


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ones_like(x) / 3


@pytest.mark.parametrize("name", MADE_ONCE)
def test_made_once(name: str) -> None:
    forward, per_size, static = MADE_ONCE[name]
    fast = check(forward)
    what = changes(fast)
    assert sum("made once per size" in line for line in what) == per_size, what
    assert sum("a constant" in line for line in what) == static, what
    assert not {"zeros", "ones", "full", "arange", "eye", "linspace", "ones_like", "full_like"} & set(operators(fast))


MADE_EACH_TIME: dict[str, Callable[..., Tensor]] = {
    "returned": lambda m, x: x.new_ones(x.size(0), 3),
    "a view returned": lambda m, x: torch.arange(x.size(0) * 2).view(-1, 2).t(),
    "uninitialized": lambda m, x: torch.empty(x.size(0), 4).fill_(1.0) * 0 + x,
    "an attribute": lambda m, x: x * m.weight - m.edges.unsqueeze(0),
    "of a tensor's values": lambda m, x: x * m.weight - torch.zeros_like(x).masked_fill(x > 0, 1.0),
}


@pytest.mark.parametrize("name", MADE_EACH_TIME)
def test_made_each_time(name: str) -> None:
    fast = check(MADE_EACH_TIME[name])
    left = [line for line in changes(fast) if not line.startswith("zeros_like:")]
    assert not left


def test_random_values_stay_random() -> None:
    model = Spelling(lambda m, x: x * m.weight + torch.rand(x.size(0), 4) + torch.bernoulli(torch.full_like(x, 0.5)))
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    x = torch.zeros(9, 4)
    results = []
    for net in (model, fast, fast):
        if net is not fast or len(results) < 2:
            torch.manual_seed(0)
        results.append(net(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_what_leaves_is_the_callers_own() -> None:
    model = Spelling(lambda m, x: (m.weight * torch.ones(x.size(0), 4), torch.ones(x.size(0), 4)))
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    x = torch.randn(3, 4)
    product, ones = fast(x)
    ones.zero_()
    product.detach().zero_()
    for found, expected in zip(fast(x), model(x), strict=True):
        assert torch.equal(found, expected)
    (miss,) = [
        miss for ran in fast._fxopt.findings[0].passes for miss in ran.misses if miss.pattern == "sized_constants"
    ]
    assert "leaves the model" in miss.reason


def test_an_edit_in_place_gets_fresh_memory() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(x.size(0), 4)
        total += x * m.weight
        half = torch.ones(x.size(0), 4)
        half[:, :2].mul_(0.5)
        mask = torch.zeros(x.size(0), dtype=torch.bool)
        mask[1:] = True
        return total * half + mask.unsqueeze(1)

    check(forward)


def test_nothing_writes_over_what_is_kept() -> None:
    """Without gradients, results may take the memory of arguments that die."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        kept = torch.full((x.size(0), 4), 0.5)
        return kept.mul(x * m.weight) + kept.sub(x) * torch.eye(4)[0].exp()

    model = Spelling(forward)
    with torch.no_grad():
        fast = optimize(model, (torch.randn(6, 4),), ALONE)
        assert changes(fast)
        x = torch.randn(6, 4)
        for _ in range(3):
            assert torch.equal(fast(x), model(x))


def test_constant_indices_become_lists() -> None:
    """torch.triu_indices is a constant by the time that advanced indexing is looked at."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        z = (x * m.weight).unsqueeze(2)
        i, j = torch.triu_indices(4, 4, 1)
        return torch.bmm(z, z.transpose(1, 2))[:, i, j]

    model = Spelling(forward)
    fast = optimize(model, (torch.randn(6, 4),))
    (change,) = [c for ran in fast._fxopt.findings[0].passes if ran.name == "field_index" for c in ran.changes]
    assert change.why == "constant indices, all in range"
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), model(x))


def test_a_model_attribute_may_change() -> None:
    model = Spelling(MADE_EACH_TIME["an attribute"])
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    x = torch.randn(6, 4)
    fast(x)
    model.edges.fill_(7.0)
    assert torch.equal(fast(x), model(x))


def test_training() -> None:
    model = Spelling(lambda m, x: ((x * m.weight).sigmoid() * (torch.arange(4) < 3).repeat(x.size(0), 1)).sum(0))
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    assert changes(fast)
    for batch in (3, 8, 3):
        x = torch.randn(batch, 4, requires_grad=True)
        wanted = [torch.autograd.grad(net(x).square().sum(), [x, model.weight]) for net in (model, fast)]
        for expected, found in zip(*wanted, strict=True):
            assert torch.equal(expected, found)
        with torch.no_grad():
            model.weight -= 0.1 * wanted[0][1]


@pytest.mark.parametrize("first", ["inference", "training"])
def test_a_tensor_made_in_inference_mode_may_be_saved_for_backward(first: str) -> None:
    model = Spelling(lambda m, x: (x * m.weight * torch.ones(x.size(0), 4)).exp())
    fast = optimize(model, config=ALONE)
    x = torch.randn(5, 4)
    for mode in ("inference", "training", "inference", "training")[first == "training" :]:
        with torch.inference_mode(mode == "inference"):
            found, expected = fast(x), model(x)
        assert torch.equal(found, expected) and found.is_inference() == expected.is_inference()
        if mode == "training":
            assert torch.equal(*(torch.autograd.grad(y.sum(), model.weight)[0] for y in (found, expected)))


def test_copies_of_the_model_work() -> None:
    model = Attention()
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    assert changes(fast)
    x = torch.randn(3, 4)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(_saved(fast), weights_only=False)):
        assert torch.equal(other(x), model(x)) and changes(other)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.dense(x) @ x.t()
        later = torch.triu(torch.ones(x.size(0), x.size(0)), 1) == 1
        return scores.masked_fill(later, float("-inf")).softmax(1) @ x


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_transforms_and_export_see_the_model_itself() -> None:
    model = Attention()
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    x = torch.randn(2, 5, 4)
    fast(x[0])
    torch.testing.assert_close(torch.vmap(fast)(x), torch.vmap(model)(x))
    exported = torch.export.export(fast, (x[0],)).module()
    assert torch.equal(exported(x[1]), model(x[1]))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(fast(mode.from_tensor(x[0]))).__name__ == "FakeTensor"
    assert torch.equal(fast(x[0]), model(x[0]))
    torch.testing.assert_close(
        torch.func.grad(lambda t: fast(t).sum())(x[0]), torch.func.grad(lambda t: model(t).sum())(x[0])
    )


def test_threads_share_it() -> None:
    model = Attention()
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    inputs = [torch.randn(batch, 4) for batch in range(1, 20)]
    expected = [model(x) for x in inputs]
    wrong: list[int] = []

    def serve(start: int) -> None:
        for number in range(200):
            index = (start * 7 + number * (start + 1)) % len(inputs)
            if not torch.equal(fast(inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=serve, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(fast._fxopt.entries) == 1


def test_the_last_few_sizes_are_kept_and_no_more() -> None:
    made: list[int] = []

    def zeros(size: int) -> Tensor:
        made.append(size)
        return torch.zeros(size)

    kept = kept_by_size(zeros)
    for size in itertools.chain(range(8), range(8)):
        assert kept(size).shape == (size,)
    assert made == list(range(8))
    kept(8), kept(8), kept(0)
    assert made[8:] == [8, 0]


def test_memory_is_bounded() -> None:
    kept = kept_by_size(torch.zeros)
    numbers = KEPT_BYTES // 4
    assert kept(numbers) is kept(numbers)
    assert kept(numbers + 1) is not kept(numbers + 1)
    half = kept(numbers // 2)
    assert kept(numbers // 2) is half and kept(numbers // 4) is kept(numbers // 4) and kept(numbers // 2) is half
    assert kept(numbers) is kept(numbers) and kept(numbers // 2) is not half


def test_what_is_too_large_to_keep_is_made_each_time() -> None:
    rows = KEPT_BYTES // 16 + 1
    model = Spelling(lambda m, x: (torch.ones(rows, 4) * m.weight).sum(0) + x)
    fast = optimize(model, (torch.randn(2, 4),), ALONE)
    assert not changes(fast) and "ones" in operators(fast)
    (miss,) = [
        miss for ran in fast._fxopt.findings[0].passes for miss in ran.misses if miss.pattern == "sized_constants"
    ]
    assert "4 MiB" in miss.reason


def test_the_strides_of_a_transposed_tensor_are_taken_over() -> None:
    model = Spelling(lambda m, x: torch.zeros_like((x * m.weight).t()) + 0.5)
    fast = optimize(model, (torch.randn(6, 4),), ALONE)
    for batch in (2, 5):
        x = torch.randn(batch, 4)
        assert fast(x).stride() == model(x).stride()
