"""Regions under torch.utils.checkpoint stay checkpointed, and all around them is optimized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxopt
from fxopt.runtime import dispatcher_of

WIDE = 48


class Net(nn.Module):
    """Lookups in front of a block, which `around` runs."""

    def __init__(self, around: Callable[[Any, Tensor], Tensor], block: nn.Module | None = None) -> None:
        super().__init__()
        self.around = around
        self.tables = nn.ModuleList(nn.EmbeddingBag(40, WIDE // 3, mode="sum") for _ in range(3))
        self.block = block or layers()
        self.out = nn.Linear(WIDE, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.around(self, torch.cat([table(ids) for table in self.tables], 1)))


def layers(inplace: bool = True) -> nn.Sequential:
    pairs = [(nn.Linear(WIDE, WIDE), nn.ReLU(inplace)) for _ in range(4)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Dropout(0.4))


def module(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.block, x, use_reentrant=False)


def reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.block, x, use_reentrant=True)


def closure(net: Net, x: Tensor) -> Tensor:
    def run(values: Tensor, scale: float) -> tuple[Tensor, Tensor, int]:
        mixed = values + x * scale
        return net.block(mixed) + 1, mixed.mean(1, keepdim=True), mixed.shape[0]

    y, mean, rows = checkpoint(run, x, 0.5, use_reentrant=False, preserve_rng_state=True)
    return y * mean + rows


def nested(net: Net, x: Tensor) -> Tensor:
    def run(values: Tensor) -> Tensor:
        return checkpoint(net.block, values.tanh(), use_reentrant=False) * 2

    return checkpoint(run, x, use_reentrant=False)


def sequential(net: Net, x: Tensor) -> Tensor:
    return checkpoint_sequential(net.block, 3, x, use_reentrant=False)


def without_gradient(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.block, x.detach(), use_reentrant=True) + x


def two(around: Callable, *block: nn.Module) -> tuple[Net, Net, nn.Module]:
    torch.manual_seed(0)
    eager = Net(around, *copy.deepcopy(block))
    model = copy.deepcopy(eager)
    return eager, model, fxopt.optimize(model)


def same_step(eager: nn.Module, optimized: nn.Module, ids: Tensor) -> None:
    outputs = []
    for each in (eager, optimized):
        each.zero_grad()
        torch.manual_seed(1)
        outputs.append(each(ids))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    for (name, mine), theirs in zip(optimized.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            size = theirs.grad.abs().max().clamp(min=1.0)
            torch.testing.assert_close(mine.grad / size, theirs.grad / size, rtol=1e-4, atol=1e-4, msg=name)


def held(model: nn.Module, ids: Tensor) -> int:
    """Bytes that a forward leaves allocated, while its result waits for backward."""
    with profile(profile_memory=True) as seen:
        result = model(ids)
    del result
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


@pytest.mark.parametrize("around", [module, reentrant, closure, nested, sequential, without_gradient])
def test_regions_stay_checkpointed(around: Callable) -> None:
    eager, _, optimized = two(around, *([layers(inplace=False)] if around is sequential else []))
    for rows in (64, 1, 0, 17):
        same_step(eager, optimized, torch.randint(0, 40, (rows, 3)))
    ids = torch.randint(0, 40, (256, 3))
    mine, theirs = held(optimized, ids), held(eager, ids)
    assert mine <= 1.05 * theirs, f"{mine} bytes are held for backward, and {theirs} in eager"
    (entry,) = dispatcher_of(optimized).entries
    assert entry.executable is not None
    report = " ".join(str(fxopt.report(optimized)).split())
    assert "embedding_columns" in report
    assert ("runs under torch.utils.checkpoint" in report) == (around is not without_gradient)
    with torch.no_grad():
        torch.testing.assert_close(optimized.eval()(ids), eager.eval()(ids), rtol=1e-4, atol=1e-4)


class Counts(nn.Module):
    """A block with statistics, which each run of it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) > -1e9 else x


class Inner(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("block", [Counts(), Branches()])
def test_a_region_that_no_graph_can_hold_runs_as_it_is(block: nn.Module) -> None:
    eager, model, optimized = two(lambda net, x: net.block(x), Inner(block))
    for rows in (16, 7):
        same_step(eager, optimized, torch.randint(0, 40, (rows, 3)))
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    (found,) = {leaf.path for entry in dispatcher_of(optimized).entries for leaf in entry.executable.capture.leaves}
    assert found.startswith("block")
    ids = torch.randint(0, 40, (256, 3))
    assert held(optimized, ids) <= 1.05 * held(eager, ids)


def test_errors_inside_are_eagers() -> None:
    def lookup(net: Net, x: Tensor) -> Tensor:
        return checkpoint(lambda v: v + net.tables[0].weight[(v[:, 0] * 0 + 41).long()].sum(), x, use_reentrant=False)

    _, _, optimized = two(lookup)
    for _ in range(2):
        with pytest.raises(IndexError):
            optimized(torch.randint(0, 40, (5, 3)))


class Asking(nn.Module):
    """A question about data between square layers: what the two sides save is alike in number and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) * 0.4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weights
        y = (x @ first).tanh()
        if (x > 5).any():
            y = y @ second
        return (y @ third).sigmoid()


class Picking(nn.Module):
    """Captured only from a call whose mask is true for several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) * 0.2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weights[0]).relu()
        return (y[x[:, 0] > 5] * y) @ self.weights[1]


@pytest.mark.parametrize("made", [Asking, Picking])
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_what_ran_a_forward_runs_its_recomputation(made: type[nn.Module], tune: Any) -> None:
    """Two calls wait for each backward, while graphs come and go: answers change until none is taken."""
    eager = made()
    fast = fxopt.optimize(copy.deepcopy(eager), config=fxopt.Config(tune=tune))
    for step in range(50):
        xs = [torch.rand(5, 6) for _ in range(2)]
        xs[0][: 1 if step % 2 else 5, 0] = 6.0
        xs[1][:, 0] = 6.0 if made is Picking else 0.0
        gradients = []
        for model in (eager, fast):
            model.zero_grad()
            ys = [checkpoint(model, x, use_reentrant=False) for x in xs]
            sum(y.square().sum() for y in ys).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_what_is_recomputed_for_two_backwards() -> None:
    eager = Asking()
    fast = fxopt.optimize(copy.deepcopy(eager), config=fxopt.Config(tune="off"))
    x = torch.rand(5, 6, requires_grad=True)
    for high in (6.0, 0.0, 6.0):
        with torch.no_grad():
            x[0, 0] = high
        grads = []
        for model in (eager, fast):
            y = checkpoint(model, x, use_reentrant=False).sum()
            grads.append([torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)])
        torch.testing.assert_close(grads[1], grads[0])


class Failing(nn.Module):
    """A bad id, or another answer, behind random numbers that a region draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.table = nn.Linear(6, 6), nn.Dropout(0.4), nn.Embedding(10, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = checkpoint(lambda z: self.drop(self.linear(z)), x, use_reentrant=False)
        if (ids == 3).any():
            y = y * 2
        return y + self.table((y.detach() > 1e6).long().sum(1) + ids)


def test_what_a_region_has_drawn_is_put_back() -> None:
    eager = Failing()
    fast = fxopt.optimize(copy.deepcopy(eager), config=fxopt.Config(tune="off"))
    for number in (0, 1, 100, 3, 2, 100):
        seen = []
        for model in (eager, fast):
            torch.manual_seed(number)
            try:
                y = model(torch.ones(5, 6), torch.full((5,), number)).detach()
            except IndexError:
                y = torch.zeros(())
            seen.append((y, torch.get_rng_state()))
        torch.testing.assert_close(seen[1], seen[0])
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable


class Around(nn.Module):
    """Calls a model within a checkpoint in ways that shift, or change, what its recomputation calls."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way, self.calls = inner, way, 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.way == "a caught error":
            with pytest.raises(RuntimeError):
                self.inner(x[:, :2])
        if self.way == "one more call" and self.calls % 2 == 0:
            with torch.no_grad():
                self.inner(x[:2])
        if self.way == "calls within each other":
            x = self.inner(x) + self.inner(x * 2)
        return self.inner(x)


@pytest.mark.parametrize("way", ["a caught error", "one more call", "calls within each other", "another model"])
def test_calls_that_a_forward_did_not_make(way: str) -> None:
    eager = nn.Sequential(nn.Linear(6, 6), nn.Tanh()) if way == "another model" else Asking()
    fast = fxopt.optimize(copy.deepcopy(eager), config=fxopt.Config(tune="off"))
    for high in (0.0, 0.0, 6.0, 0.0):
        x, grads = torch.rand(5, 6), []
        x[0, 0] = high
        for model in (eager, fast):
            model.zero_grad()
            around = Around(model, way)
            y = around(x)
            if way == "another model" and model is fast:
                around.inner = copy.deepcopy(model)
                around.inner.load_state_dict(model.state_dict())
            y.square().sum().backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
