"""Models around a module that communicates: their Python is cut, or runs as it is, and both give eager's results."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt.runtime import dispatcher_of

pytestmark = pytest.mark.usefixtures("group")
CONFIG = fxopt.Config(tune="off")


class Sum(nn.Module):
    """Adds up over all ranks, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x * 1
        dist.all_reduce(y.detach())
        return y


class Host(nn.Module):
    """Dense layers, a communicating module, dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.sum = Sum()
        self.above = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.above(self.sum(self.below(x)) + x)


class Scaled(Host):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x * self.scale + self.shift), "x": (x, None, 3)}


class Twice(Host):
    def forward(self, x: Tensor) -> Any:
        return self.above(self.sum(self.below(x)) + self.sum(x))


class Lists(Host):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Any:
        return sum(tower(self.sum(x)) for tower in self.towers)


class Scripted(Host):
    def __init__(self) -> None:
        super().__init__()
        self.below = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Twice(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return torch.sigmoid(self.last(self.inner(x))).squeeze(-1)


class Training(Host):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y * 2 if self.training else y


class Dropped(Host):
    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.5, self.training)


class Quiet(Host):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.sum(self.below(x))
        return self.above(y + x)


class Checkpointed(Host):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.above, self.sum(self.below(x)), use_reentrant=False)


class Counting(Host):
    steps = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return super().forward(x) * self.steps


class Logging(Host):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(1)
        return super().forward(x) + len(self.seen)


class Typed(Host):
    def forward(self, x: Any) -> Any:
        return super().forward(x if isinstance(x, Tensor) else x[0])


class Branching(Host):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Random(Host):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * random.random()


class Noise(Host):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + torch.rand(4)


class Sized(Host):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).reshape(x.shape[0] * 2, 2)


class Hooked(Host):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Host()
        self.inner.register_forward_hook(lambda module, args, result: result + 1)

    def forward(self, x: Tensor) -> Any:
        return self.above(self.inner(x))


CUT = (Host, Scaled, Twice, Lists, Inside, Training, Dropped, Sized)
AS_IT_IS = (Quiet, Checkpointed, Counting, Logging, Typed, Branching, Random, Noise, Hooked)


def seeded(model: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    return model(x)


@pytest.mark.parametrize("kind", [*CUT, *AS_IT_IS])
def test_same_results_gradients_and_collectives(kind: type[nn.Module]) -> None:
    eager = kind()
    fast = fxopt.optimize(copy.deepcopy(eager), config=CONFIG)
    for training in (True, False, True):
        eager.train(training), fast.train(training)
        for size in (3, 1, 0, 5):
            x = torch.randn(size, 4)
            expected, found = seeded(eager, x), seeded(fast, x)
            torch.testing.assert_close(found, expected)
            for result in (expected, found):
                sum(leaf.sum() for leaf in tensors(result)).backward()  # type: ignore[union-attr]
    for one, other in zip(eager.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    assert [m.calls for m in fast.modules() if isinstance(m, Sum)] == [
        m.calls for m in eager.modules() if isinstance(m, Sum)
    ]
    assert vars(fast).get("steps") == vars(eager).get("steps")
    assert vars(fast).get("seen") == vars(eager).get("seen")


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]


@pytest.mark.parametrize("kind", [*CUT, *AS_IT_IS])
def test_the_report_says_what_was_done(kind: type[nn.Module]) -> None:
    fast = fxopt.optimize(kind(), config=CONFIG)
    for size in (3, 5, 7):
        fast(torch.randn(size, 4))
    found = dispatcher_of(fast).findings
    reasons = [leaf.reason for each in found for leaf in each.leaves]
    assert any("torch.distributed" in reason for reason in reasons)
    assert any("runs as it is" in reason for reason in reasons) == (kind in AS_IT_IS), reasons
    captured = [each for each in found if each.operators_before]
    assert captured and not any(each.eager_reason for each in found)
    assert len({(each.signature, each.operators_before) for each in captured}) <= 3  # none for each batch size
    assert "torch.distributed" in str(fxopt.report(fast))


def test_nothing_runs_ahead_of_a_call() -> None:
    model = Host()
    fast = fxopt.optimize(model, (torch.randn(3, 4),), CONFIG)
    assert model.sum.calls == 0
    fast(torch.randn(3, 4))
    assert model.sum.calls == 1


def test_a_model_that_communicates_by_itself_stays_eager() -> None:
    fast = fxopt.optimize(Sum(), config=CONFIG)
    for _ in range(3):
        fast(torch.randn(3, 4))
    assert fast.calls == 3
    (found,) = dispatcher_of(fast).findings
    assert "communicates" in found.eager_reason


def test_a_replaced_module_and_a_replaced_parameter_take_effect() -> None:
    model = Scaled()
    fast = fxopt.optimize(model, config=CONFIG)
    x = torch.randn(3, 4)
    for _ in range(3):
        fast(x)
    model.scale = nn.Parameter(torch.full((4,), 3.0))
    torch.testing.assert_close(fast(x), model(x))
    model.above = nn.Linear(4, 2)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    model.sum = nn.Identity()
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))


def test_a_scripted_part_runs_as_it_is() -> None:
    model = Scripted()
    fast = fxopt.optimize(model, config=CONFIG)
    for size in (3, 1, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fast(x), model(x))
    reasons = [leaf.reason for found in dispatcher_of(fast).findings for leaf in found.leaves]
    assert set(reasons) == {"TorchScript", "communicates: its code calls torch.distributed"}


def test_a_wrapper_delegates() -> None:
    wrapper = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    fast = fxopt.optimize(wrapper, config=CONFIG)
    assert fast is wrapper
    fast(torch.randn(3, 4)).sum().backward()
    (found,) = dispatcher_of(fast.module).findings
    assert found.operators_before == 2
    assert "2 ->" in str(fxopt.report(fast))


def test_a_replaced_forward_runs_as_it_is() -> None:
    model, calls = Host(), []
    original = model.above.forward
    model.above.forward = lambda x: (calls.append(1), original(x))[1]  # type: ignore[method-assign]
    fast = fxopt.optimize(model, config=CONFIG)
    for _ in range(4):
        fast(torch.randn(3, 4))
    assert len(calls) == 4
