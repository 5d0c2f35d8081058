"""Towers and experts: every spelling becomes one call, with eager's numbers; what must not is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.torch_internals.seeds import seed_started

ALWAYS = Config(tune="off", verify="full")


class Experts(nn.Module):
    """Four experts, two tasks; `mix` is the spelling."""

    def __init__(self, mix: Callable[[Tensor, list[Tensor]], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mix = mix
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.Tanh()) for _ in range(4)
        )
        self.gates = nn.ModuleList(nn.Linear(7, 4, bias=False) for _ in range(2))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(5, 3), nn.Sigmoid(), nn.Linear(3, 1)) for _ in range(2))
        self.to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        experts = [expert(x) for expert in self.experts]
        return [
            tower(self.mix(gate(x), experts)).sigmoid() for gate, tower in zip(self.gates, self.towers, strict=True)
        ]


def by_bmm(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.bmm(gate.softmax(-1).unsqueeze(1), torch.stack(experts, 1)).squeeze(1)


def by_matmul_of_columns(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return (torch.stack(experts, 2) @ F.softmax(gate, 1)[:, :, None])[..., 0]


def by_ellipsis(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.einsum("...e,e...d->...d", gate.softmax(1), torch.stack(experts))


def by_einsum(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.einsum("be,ebd->bd", gate.softmax(1), torch.stack(experts))


def by_sum(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return (torch.cat([e.unsqueeze(1) for e in experts], 1) * gate.softmax(1).unsqueeze(-1)).sum(dim=1)


def by_loop(gate: Tensor, experts: list[Tensor]) -> Tensor:
    weights, mixed = torch.softmax(gate, dim=1), torch.zeros(())
    for i, expert in enumerate(experts):
        mixed = weights[:, i : i + 1] * expert if i == 0 else mixed + weights[:, i : i + 1] * expert
    return mixed


def by_python_sum(gate: Tensor, experts: list[Tensor]) -> Tensor:
    weights = gate.softmax(1).split(1, 1)
    return sum(w * e for w, e in zip(weights, experts, strict=True))  # type: ignore[return-value]


def without_softmax(gate: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.einsum("bed,be->bd", torch.stack(experts, 1), gate.sigmoid())


SPELLINGS = (by_bmm, by_matmul_of_columns, by_einsum, by_ellipsis, by_sum, by_loop, by_python_sum, without_softmax)


def calls(model: nn.Module) -> list[str]:
    """What the rewritten graph calls, less the views and items."""
    (entry,) = model._fxopt.entries
    nodes = entry.executable.graph.graph.nodes
    called = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target._schema.name for target in called if not target.is_view and "sym_size" not in str(target)]


def assert_same(model: nn.Module, fast: nn.Module, batches: tuple[int, ...] = (0, 1, 2, 7, 33), width: int = 7) -> None:
    dtype = next(model.parameters()).dtype
    for batch in batches:
        x = torch.randn(batch, width, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast(x), model(x))
    x = torch.randn(5, width, dtype=dtype)
    expected, found = (gradients(net, x) for net in (model, fast))
    torch.testing.assert_close(found, expected)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    out = model(x)
    total = sum(y.square().sum() for y in (out if isinstance(out, list | tuple) else [out]))
    wanted = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(total, [x, *wanted], allow_unused=True)  # type: ignore[arg-type]


def optimized(model: nn.Module, width: int = 7, grad: bool = False) -> nn.Module:
    dtype = next(model.parameters()).dtype
    with torch.set_grad_enabled(grad):
        return optimize(model, (torch.randn(6, width, dtype=dtype),), ALWAYS)


@pytest.mark.parametrize("mix", SPELLINGS, ids=lambda mix: mix.__name__)
def test_experts_in_any_spelling_are_one_call(mix: Callable) -> None:
    model = Experts(mix)
    fast = optimized(model)
    assert calls(fast) == ["fxopt::towers"]
    assert_same(model, fast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    model = Experts(by_sum, dtype)
    fast = optimized(model)
    assert "fxopt::towers" not in calls(fast)
    x = torch.randn(5, 7, dtype=dtype)
    torch.testing.assert_close(fast(x), model(x))


class Spelled(nn.Module):
    """A forward over three linears of [B, 6] and one gate."""

    def __init__(self, forward: Callable[[Spelled, Tensor], object]) -> None:
        super().__init__()
        self.spelled = forward
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.gate = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> object:
        return self.spelled(self, x)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack([F.relu(net(x)) for net in (self.a, self.b, self.c)], 1)


def tied(self: Spelled, x: Tensor) -> Tensor:
    return torch.cat([self.a(x), self.a(x * 2), F.linear(x, self.a.weight)], 1)


def applied_twice(self: Spelled, x: Tensor) -> Tensor:
    return self.a(self.a(x)) + self.b(x)


def read_by_others(self: Spelled, x: Tensor) -> tuple[Tensor, ...]:
    experts = self.stack(x)
    logits = self.gate(x)
    weights = logits.softmax(-1)
    return (weights.unsqueeze(1) @ experts).squeeze(1), experts[:, 1], weights, logits.exp()


def activated_and_not(self: Spelled, x: Tensor) -> tuple[Tensor, ...]:
    a, b = self.a(x), self.b(x)
    return torch.cat([a.relu(), b], 1), a, torch.stack([b.tanh(), a.relu()], 1)


def edited(self: Spelled, x: Tensor) -> Tensor:
    a, b = self.a(x), self.b(x)
    a[:, 0] += 1
    return torch.cat([self.c(a), b.sigmoid(), self.gate(b)], 1)


def batch_norm_between(self: Spelled, x: Tensor) -> Tensor:
    a, b = self.a(x), self.b(x)
    mean = torch.cat([a, b], 1).mean(0, keepdim=True)[:, :6]
    return self.c(a - mean) * self.c(b)


def gated(self: Spelled, x: Tensor) -> Tensor:
    return x * self.a(x).sigmoid() * self.b(x) + self.c(x)


def shared_rows(self: Spelled, x: Tensor) -> Tensor:
    return self.c(self.stack(x)).sum(1)


def over_the_batch(self: Spelled, x: Tensor) -> Tensor:
    return (self.gate(x).softmax(0).unsqueeze(-1) * self.stack(x)).sum(1)


def dims_swapped(self: Spelled, x: Tensor) -> Tensor:
    return (self.gate(x).softmax(1).unsqueeze(-1) * self.stack(x)).sum(2)


def two_softmaxes(self: Spelled, x: Tensor) -> Tensor:
    some = torch.cat([self.gate(x)[:, :2].softmax(1), self.gate(x)[:, 2:].softmax(1)], 1)
    return torch.einsum("be,bed->bd", some, self.stack(x))


def part_of_a_softmax(self: Spelled, x: Tensor) -> Tensor:
    return torch.einsum("be,bed->bd", self.gate(x).softmax(1)[:, :2], self.stack(x)[:, 1:])


def turned_experts(self: Spelled, x: Tensor) -> Tensor:
    return torch.einsum("be,bed->bd", self.gate(x).softmax(1).flip(1), self.stack(x))


def rows_folded(self: Spelled, x: Tensor) -> Tensor:
    return torch.cat([self.a(x), self.b(x)], 0).view(-1, 2, 6)[:, 0]


def across_rows(self: Spelled, x: Tensor) -> Tensor:
    a, b = self.a(x), self.b(x)
    return torch.stack([a, b], 0).transpose(0, 1).reshape(-1, 6).tanh()


def chunks_of_rows(self: Spelled, x: Tensor) -> Tensor:
    """As norms over parts of a batch have it: two rows make fewer parts than the rows of the capture."""
    return torch.cat([self.a(part).relu() for part in torch.cat([self.b(x), self.c(x)], 1)[:, :6].chunk(3)])


def one_bias(self: Spelled, x: Tensor) -> Tensor:
    return torch.stack([F.linear(x, net.weight, net.bias[:1]) for net in (self.a, self.b, self.c)], 1)


FORWARDS = (
    *(tied, applied_twice, read_by_others, activated_and_not, edited, batch_norm_between, gated, shared_rows),
    *(over_the_batch, dims_swapped, two_softmaxes, part_of_a_softmax, turned_experts, rows_folded, across_rows),
    *(chunks_of_rows, one_bias),
)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("grad", [False, True])
def test_numbers_are_eagers(forward: Callable, grad: bool) -> None:
    model = Spelled(forward)
    fast = optimized(model, 6, grad)
    (findings,) = fast._fxopt.findings
    assert not findings.eager_reason and not any(ran.rolled_back for ran in findings.passes)
    assert not any("itself failed" in miss.reason for ran in findings.passes for miss in ran.misses)
    assert_same(model, fast, (1, 2, 7) if grad else (0, 1, 2, 7, 33), 6)


def test_weights_may_change_and_some_may_be_frozen() -> None:
    model = Experts(by_bmm)
    model.experts[0].requires_grad_(False)
    fast = optimized(model)
    for change in (
        lambda: model.experts[1][0].weight.data.mul_(2),
        lambda: model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}),
        lambda: setattr(model.gates[0], "weight", nn.Parameter(torch.randn(7, 4).t())),
        lambda: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step(),
    ):
        change()
        assert_same(model, fast, (3,))


def test_hooks_see_what_they_saw() -> None:
    model = Experts(by_sum)
    seen: list[Tensor] = []
    model.experts[2][0].register_forward_hook(lambda module, args, out: seen.append(out) or out * 3)
    fast = optimized(model)
    x = torch.randn(4, 7)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(seen) >= 2 and torch.equal(seen[-1], seen[-2])


def test_inputs_of_any_layout() -> None:
    model = Experts(by_bmm)
    fast = optimized(model)
    with torch.no_grad():
        for x in (torch.randn(7, 5).t(), torch.randn(5, 14)[:, ::2], torch.randn(1, 7).expand(5, 7)):
            torch.testing.assert_close(fast(x), model(x))


class Random(nn.Module):
    """A random network of linears, activations, joins, views, mixtures and products."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.linears = nn.ModuleList()
        with torch.no_grad():
            self(torch.randn(2, 6), build=True)

    def forward(self, x: Tensor, build: bool = False) -> tuple[Tensor, ...]:
        r, nets = random.Random(self.seed), iter(self.linears)
        values = [x]

        def linear(source: Tensor, width: int) -> Tensor:
            if not build:
                return next(nets)(source)
            net = nn.Linear(source.shape[-1], width, bias=len(self.linears) % 2 == 0)
            self.linears.append(net)
            return net(source)

        for _ in range(r.randint(3, 8)):
            source, width, kind = r.choice(values), r.choice((2, 6, 17)), r.randrange(6)
            if kind < 2:
                values.append(r.choice((torch.relu, torch.tanh, torch.sigmoid, torch.neg))(linear(source, width)))
            elif kind == 2:
                values.append(torch.cat([r.choice(values), source], 1))
            elif kind == 3:
                values.append(source[:, : max(1, source.shape[1] // 2)])
            elif kind == 4:
                experts = torch.stack([linear(source, width).relu() for _ in range(3)], 1)
                values += [torch.einsum("be,bed->bd", linear(x, 3).softmax(1), experts), experts.flatten(1)]
            else:
                values.append(linear(source, width) * linear(x, width).sigmoid())
        return tuple(values[1:])


@pytest.mark.parametrize("seed", range(12))
def test_random_networks(seed: int) -> None:
    seed_started(seed)
    model = Random(seed)
    fast = optimized(model, 6)
    (findings,) = fast._fxopt.findings
    assert not findings.eager_reason and not any(ran.rolled_back for ran in findings.passes)
    assert_same(model, fast, (1, 5), 6)


class Numbers(nn.Module):
    """Columns of one number, each through a layer of its own, in one tensor with lookups, as FuxiCTR has them."""

    def __init__(self, numbers: int = 5, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, width, bias=False) for _ in range(numbers))
        self.tables = nn.ModuleList(nn.Embedding(9, width) for _ in range(3))
        self.out = nn.Linear((numbers + 3) * width, 1)

    def forward(self, ids: Tensor, *numbers: Tensor) -> Tensor:
        rows = [layer(x.view(-1, 1)) for layer, x in zip(self.layers, numbers, strict=True)]
        rows += [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return self.out(torch.stack(rows, 1).flatten(1))


@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_one_number_are_one_call(grad: bool) -> None:
    model = Numbers()
    fast = optimize(model, (torch.zeros(7, 3, dtype=torch.int64), *torch.randn(5, 7)), ALWAYS)
    for B in (7, 1, 0, 33):
        arguments = torch.randint(0, 9, (B, 3)), *torch.randn(5, B)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(fast(*arguments), model(*arguments))
    changed = {ran.name: [c.what for c in ran.changes] for f in fast._fxopt.findings for ran in f.passes if ran.changes}
    assert "contractions" not in changed
    assert grad or any("6 linears" in what for what in changed["towers"])
