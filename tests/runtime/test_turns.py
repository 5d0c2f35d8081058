"""Calls around opaque submodules take turns: each runs once, on one side, and the faster side gets those to come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt import Config
from fxopt.findings import Findings
from fxopt.runtime import dispatch, turns
from fxopt.runtime.turns import TURNS, Turns
from fxopt.torch_internals.seeds import seed_started
from fxopt.tune.tuner import Tuner
from fxopt.verify.slower import takes_turns


class Leaf(nn.Module):
    """Counts, draws, and asks about data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.register_buffer("total", torch.zeros(()))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.total += 1
        return self.layer(x) if float(x.sum()) > 0 else torch.dropout(x, 0.5, True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.leaf, self.layer = Leaf(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.leaf(x + 1).relu() * 2)


class Clock:
    """Its seconds pass in calls of one side."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sides: list[str] = []

    def side(self, name: str, seconds: float) -> Callable[[], str]:
        def run() -> str:
            self.now += seconds
            self.sides.append(name)
            return name

        return run

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


@pytest.fixture
def _taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.stages.takes_turns", lambda executable, *chosen: bool(executable.capture.leaves))


@pytest.mark.parametrize(("eager", "faster"), [(0.5, "eager"), (1.0, "graph"), (2.0, "graph")])
def test_after_some_turns_the_faster_side_gets_all_calls(clock: Clock, eager: float, faster: str) -> None:
    findings = Findings()
    race, x = Turns(findings), [torch.zeros(3, 4)]
    for _ in range(2 * TURNS + 10):
        given = race.run(x, clock.side("graph", 1.0), clock.side("eager", eager))
        assert given == clock.sides[-1]
    assert clock.sides == ["graph", "eager"] * TURNS + [faster] * 10
    reasons = [miss.reason for ran in findings.passes for miss in ran.misses]
    assert race.all_by_eager == bool(reasons) == (faster == "eager")
    assert not reasons or ("8 to 15 numbers" in reasons[0] and "0.50x as fast" in reasons[0])


def test_one_slow_call_decides_nothing(clock: Clock) -> None:
    race, x = Turns(Findings()), [torch.zeros(1)]
    for number in range(2 * TURNS + 1):
        race.run(x, clock.side("graph", 1.0 if number else 99.0), clock.side("eager", 2.0))
    assert clock.sides[-1] == "graph"


def test_each_size_is_decided_by_itself(clock: Clock) -> None:
    """As for a graph whose checks cost 2, and whose kernels are twice as fast."""
    race = Turns(Findings())
    for rows in (1, 100) * (2 * TURNS):
        race.run([torch.zeros(rows)], clock.side("graph", 2 + rows / 2), clock.side("eager", rows))
    decided = [race.run([torch.zeros(rows)], lambda: "graph", lambda: "eager") for rows in (1, 100, 70)]
    assert decided == ["eager", "graph", "graph"] and not race.all_by_eager


def test_new_sizes_are_undecided(clock: Clock) -> None:
    race = Turns(Findings())
    assert not race.all_by_eager
    for _ in range(2 * TURNS):
        race.run([torch.zeros(1)], clock.side("graph", 2.0), clock.side("eager", 1.0))
    assert race.all_by_eager
    race.run([torch.zeros(9)], clock.side("graph", 2.0), clock.side("eager", 1.0))
    assert not race.all_by_eager


@pytest.mark.usefixtures("_taken")
@pytest.mark.parametrize("faster", ["graph", "eager"])
@pytest.mark.parametrize("training", [False, True])
def test_effects_happen_once_and_random_numbers_are_eagers(
    monkeypatch: pytest.MonkeyPatch, training: bool, faster: str
) -> None:
    monkeypatch.setattr(turns.time, "perf_counter", lambda: 0.0)  # a tie, which the graph wins
    if faster == "eager":
        monkeypatch.setattr(Turns, "_decide", lambda self, size, *seconds: self._by_eager.setdefault(size, True))
    model, twin = Model().train(training), Model().train(training)
    fast = fxopt.optimize(model)
    seed_started(3)
    state = torch.get_rng_state()
    for net in (fast, twin):
        torch.set_rng_state(state)
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with torch.set_grad_enabled(training):
            for number in range(100):
                x = torch.randn(1 + number % 2, 3, generator=generator)
                y = net(x)
                if training:
                    optimizer.zero_grad()
                    y.square().sum().backward()
                    optimizer.step()
        net.drawn = torch.get_rng_state()
    assert torch.equal(model.drawn, twin.drawn)  # type: ignore[arg-type]
    assert model.leaf.calls == twin.leaf.calls == 100 and model.leaf.seen == twin.leaf.seen
    for own, others in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(own, others)
    (entry,) = fast._fxopt.entries  # type: ignore[union-attr,misc]
    assert entry.stays_eager == (faster == "eager")  # type: ignore[union-attr]


@pytest.mark.usefixtures("_taken")
def test_a_checkpoint_runs_both_forwards_on_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts what is saved for backward."""
    monkeypatch.setattr(dispatch, "_MANY", 3)
    fast, twin = fxopt.optimize(Model()), Model()
    monkeypatch.setattr(Turns, "_decide", lambda self, size, *seconds: self._by_eager.setdefault(size, True))
    for number in range(120):
        x = torch.rand(2, 3)
        for net in (fast, twin):
            y: Any = checkpoint(net, x, use_reentrant=False) if number % 3 else net(x)
            y.sum().backward()
    for own, others in zip(fast.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, others.grad)


def test_calls_that_have_long_been_eagers_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 or self.training else -x

    model = fxopt.optimize(Branches().eval())
    looks, x = list[int](), torch.ones(3)
    ambient = dispatch.ambient
    monkeypatch.setattr(dispatch, "ambient", lambda: looks.append(0) or ambient())
    for _ in range(dispatch._MANY + 1):
        model(x)
    assert len(looks) > dispatch._MANY
    looks.clear()
    for _ in range(10 * (dispatch._UNASKED + 1)):
        assert torch.equal(model(x), 2 * x)
    assert len(looks) == 10
    model.register_buffer("shift", torch.zeros(3))
    model._fxopt.prepare((x,))  # type: ignore[union-attr,operator]
    looks.clear()
    model(x)
    assert looks, "who asks for a capture does not wait for it"


@pytest.mark.timed
def test_who_chooses_takes_no_turns() -> None:
    x = torch.randn(2, 3)
    for config in (Config(), Config(tune="off"), Config(verify="off"), Config(max_rewrites=9)):
        (entry,) = fxopt.optimize(Model(), x, config)._fxopt.entries  # type: ignore[union-attr,misc]
        assert (entry.executable.turns is not None) == (config == Config())  # type: ignore[union-attr]


def test_devices_that_nobody_waits_for_take_none() -> None:
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            node = SimpleNamespace(meta={"val": torch.empty(3, device=device)})
        captured = SimpleNamespace(graph=SimpleNamespace(graph=SimpleNamespace(nodes=[node])), leaves=["leaf"])
        executable: Any = SimpleNamespace(capture=captured)
        assert takes_turns(executable, Config(), Tuner("full")) == (device == "cpu")
