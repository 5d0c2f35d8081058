"""repeated: eager's numbers and gradients from one graph at every batch, and nothing where lanes are not alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.kernels.by_rows import op
from fxopt.rewrites import PASSES

FIELDS, DIM = 6, 4
PAIRS = list(itertools.combinations(range(FIELDS), 2))


class Loop(nn.Module):
    """`lane(z, i, j)` for each pair of fields of z [B, 6, 4]; `collect` makes one tensor of them."""

    def __init__(self, lane: Callable, collect: Callable = lambda lanes: torch.stack(lanes, 1), **state: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(FIELDS, DIM))
        self.each = nn.ModuleList(nn.Linear(DIM, 3) for _ in PAIRS)
        self.square = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(FIELDS))
        self.experts = nn.Parameter(torch.randn(FIELDS, FIELDS, DIM, DIM))
        self.lane, self.collect = lane, collect

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.scale
        return self.collect([self.lane(self, z, i, j) for i, j in PAIRS])


def product(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, i] * z[:, j]


def of_slices(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, i : i + 1] * F.hardtanh(z[:, j : j + 1])


def gated_slices(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    """On a CPU without AVX-512, the last bit of torch's sigmoid depends on where a number stands."""
    return z[:, i : i + 1] * torch.sigmoid(z[:, j : j + 1])


def of_pieces(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z.unbind(1)[i] - z.split(1, 1)[j].squeeze(1)


def inner(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return (z[:, i] * z[:, j]).sum(-1, keepdim=True)


def softmax(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return (z[:, i] + z[:, j].mean(1, keepdim=True)).softmax(1)


def shared(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, i] * m.scale[0] + z[:, j] * z.sum(1)


def bilinear_of_pair(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return m.each[PAIRS.index((i, j))](z[:, i]) * z[:, j, :3]


def bilinear_each(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return m.square[i](z[:, i]) * z[:, j]


def bilinear_all(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return m.square[0](z[:, i]) * z[:, j]


def experts(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return torch.tanh(torch.matmul(m.experts[i, j].t(), z[:, 0].unsqueeze(2))).squeeze(2)


def turned(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return torch.tanh(F.linear(z[:, i], m.experts[i, j].permute(1, 0)))


def of_own_inputs(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return F.relu(m.each[PAIRS.index((i, j))](z[:, i] * z[:, j]))


def through_a_matrix(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return F.relu(torch.matmul(z[:, i : i + 1], m.square[j].weight)) * 2


def cat(dim: int) -> Callable:
    return lambda lanes: torch.cat(lanes, dim)


def stack(dim: int) -> Callable:
    return lambda lanes: torch.stack(lanes, dim)


def mixed(lanes: list[Tensor]) -> Tensor:
    """Operands of other kinds between two runs."""
    return torch.cat([*lanes[:7], lanes[0].exp(), lanes[3][:, :2], *lanes[7:]], 1)


KEPT = {"dead_checks", "views", "cats", "identities", "sizes", "repeated", "embedding_columns", "views_of_columns"}
ALONE = Config(verify="off", tune="off", disable=tuple(rewrite.name for rewrite in PASSES if rewrite.name not in KEPT))

EXACT = [
    (product, stack(1)), (product, stack(-1)), (product, stack(0)), (product, cat(1)), (product, mixed),
    (of_slices, cat(1)), (of_slices, cat(2)), (of_slices, stack(2)), (of_pieces, cat(-1)), (shared, stack(1)),
]  # fmt: skip
CLOSE = [
    (product, sum), (inner, cat(1)), (inner, stack(2)), (softmax, stack(1)),
    (gated_slices, cat(1)), (gated_slices, cat(2)), (gated_slices, stack(2)),
    (bilinear_of_pair, cat(1)), (bilinear_of_pair, stack(1)), (bilinear_each, stack(1)), (bilinear_all, cat(1)),
    (experts, stack(2)), (experts, stack(1)), (turned, stack(1)), (of_own_inputs, stack(1)), (through_a_matrix, cat(1)),
]  # fmt: skip


def changes(model: nn.Module) -> list[str]:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason
    assert not any(ran.rolled_back for ran in findings.passes)
    return [change.what for ran in findings.passes if ran.name == "repeated" for change in ran.changes]


def error(found: Tensor, reference: Tensor) -> float:
    return (found.double() - reference).abs().max().item() if found.numel() else 0.0


@pytest.mark.parametrize(("lane", "collect"), EXACT + CLOSE)
def test_values_and_gradients(lane: Callable, collect: Callable) -> None:
    check(lane, collect)


@pytest.mark.parametrize(
    ("lane", "collect"),
    [(of_slices, cat(1)), (inner, stack(1)), (product, sum), (product, stack(0)), (bilinear_of_pair, stack(1)),
     (bilinear_each, cat(1)), (experts, stack(2)), (product, mixed)],
)  # fmt: skip
def test_many_rows(lane: Callable, collect: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of two rows, or as the loop that it was."""
    monkeypatch.setattr(op, "_CHUNK", 1)
    monkeypatch.setattr(op, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(op, "_BYTES_A_CALL", 1)
    check(lane, collect)


def check(lane: Callable, collect: Callable) -> None:
    model = Loop(lane, collect)
    exact = (lane, collect) in EXACT
    reference = Loop(lane, collect).double()
    fast = optimize(model, (torch.randn(5, FIELDS, DIM),), ALONE)
    assert len(changes(fast)) == 1
    for batch in (0, 1, 2, 7):
        x = torch.randn(batch, FIELDS, DIM)
        expected, found, precise = model(x), fast(x), reference(x.double())
        assert found.shape == expected.shape and found.is_contiguous() == expected.is_contiguous()
        budget = 0.0 if exact else 2 * error(expected, precise) + 1e-6
        assert torch.equal(found, expected) if exact else error(found, precise) <= budget
        used = [name for name, p in model.named_parameters() if p in graph_leaves(expected)]
        gradients = [
            torch.autograd.grad(y.square().sum(), [dict(m.named_parameters())[name] for name in used])
            for m, y in ((model, expected), (fast, found), (reference, precise))
        ]
        for eager, ours, exactly in zip(*gradients, strict=True):
            assert error(ours, exactly) <= 2 * error(eager, exactly) + 1e-5 * (1 + exactly.abs().max().item())
    assert len(fast._fxopt.entries) == 1


def graph_leaves(value: Tensor) -> set[Tensor]:
    """The parameters that a value depends on."""
    found, seen, unread = set(), set(), [value.grad_fn]
    while unread:
        function = unread.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        found |= {function.variable} if hasattr(function, "variable") else set()
        unread.extend(following for following, _ in function.next_functions)
    return found


class Lookups(nn.Module):
    """Field-aware pairs of lookups, as one table for each pair or one table read by all."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.tables = nn.ModuleList(nn.Embedding(10, DIM) for _ in range(2 * len(PAIRS)))

    def forward(self, ids: Tensor) -> Tensor:
        if self.whole:
            fields = [self.tables[i](ids) for i in range(FIELDS)]
            return torch.stack([fields[j][:, i] * fields[i][:, j] for i, j in PAIRS], 1)
        tables = iter(self.tables)
        return torch.cat([next(tables)(ids[:, i]) * next(tables)(ids[:, j]) for i, j in PAIRS], 1)


@pytest.mark.parametrize("whole", [True, False])
def test_lookups_stay_embedding_columns(whole: bool) -> None:
    model = Lookups(whole)
    fast = optimize(model, (torch.randint(0, 10, (6, FIELDS)),))
    assert len(changes(fast)) == 1
    graph = fast._fxopt.entries[0].executable.graph.graph
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    for batch in (0, 1, 9):
        ids = torch.randint(0, 10, (batch, FIELDS))
        assert torch.equal(fast(ids), model(ids))
        found, expected = (
            torch.autograd.grad(m(ids).square().sum(), [t.weight for t in model.tables[:FIELDS]]) for m in (fast, model)
        )
        torch.testing.assert_close(found, expected)


def its_own_scalar(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, i] * (1.5 + i + FIELDS * j)


def its_own_width(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, i, : 1 + (i + j) % 2] * z[:, j, : 1 + (i + j) % 2]


def its_own_dim(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return (z[:, i] if (i + j) % 2 else z[:, :4, 0]) * 2


def by_the_input(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return z[:, (z[0, i, j % DIM] > 0).long()] * z[:, j]


def random(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return F.dropout(z[:, i], 0.5) * z[:, j]


def of_computed_tensors(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    return F.relu(z.cumsum(1 + (i + j) % 2).cumprod(1).roll(i, 0).roll(j, 1))


def edited(m: Loop, z: Tensor, i: int, j: int) -> Tensor:
    product = z[:, i] * z[:, j]
    product[:, 0] = 0
    return product


@pytest.mark.parametrize(
    "lane", [its_own_scalar, its_own_width, its_own_dim, by_the_input, random, of_computed_tensors, edited]
)
def test_lanes_that_are_not_alike_stay(lane: Callable) -> None:
    model = Loop(lane, cat(1)).eval()
    fast = optimize(model, (torch.randn(5, FIELDS, DIM),), ALONE)
    (findings,) = fast._fxopt.findings
    assert findings.eager_reason or not changes(fast)
    x = torch.randn(3, FIELDS, DIM)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(fast(x), expected)


def test_results_that_are_outputs_are_computed_once() -> None:
    class Outputs(Loop):
        def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
            lanes = [self.lane(self, x * self.scale, i, j) for i, j in PAIRS]
            return [torch.stack(lanes, 1), *lanes]

    for gradients, reason in ((False, "nobody else needs"), (True, "gradients may be asked for")):
        with torch.set_grad_enabled(gradients):
            fast = optimize(Outputs(product), (torch.randn(5, FIELDS, DIM),))
        assert not changes(fast)
        (findings,) = fast._fxopt.findings
        assert any(reason in miss.reason for ran in findings.passes for miss in ran.misses)


def test_dropout_in_training_stays() -> None:
    class Dropped(Loop):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([F.dropout(x[:, i], 0.5, self.training) * x[:, j] for i, j in PAIRS], 1)

    model = Dropped(product)
    x = torch.randn(4, FIELDS, DIM)
    assert not changes(optimize(model.train(), (x,)))
    assert len(changes(optimize(model.eval(), (x,)))) == 1


def test_large_weights_are_not_copied() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(nn.Sequential(nn.Linear(128, 64), nn.ReLU()) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([tower(x) for tower in self.towers], 1)

    assert not changes(optimize(Towers(), (torch.randn(4, 128),)))
