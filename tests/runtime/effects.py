"""Models whose forward does more than give an answer, and all that such a forward can leave behind."""

from __future__ import annotations

import argparse
import collections
import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxopt.torch_internals.seeds import seed_started

CALLS: list[int] = []
STATS = {"calls": 0}
TOTAL = 0
SEEN = torch.zeros(2)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 2)
        self.table = nn.Embedding(7, 3)

    def answer(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x + self.table(ids))


class CountedBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.answer(x, ids) * self.steps


class CountedInPlace(CountedBuffer):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.steps += 1
        return self.answer(x, ids) * self.steps


class PlainMean(Base):
    """A running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.answer(x - self.mean, ids)


class PlainInPlace(PlainMean):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.answer(x - self.mean, ids)


class PythonCounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.answer(x, ids) * self.calls


class QuietCounter(PythonCounter):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.answer(x, ids)


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.rows.append(1)
        return self.answer(x, ids) + len(self.rows)


class Caches(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        before = self.cache.get("last", 0.0)
        self.cache["last"] = x.detach().sum()
        return self.answer(x, ids) + before


class Average:
    """A helper that is no module."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)
        self.updates = 0

    def update(self, x: Tensor) -> Tensor:
        self.value = self.value * 0.9 + x.detach().mean(0) * 0.1
        self.updates += 1
        return self.value


class Helped(Base):
    def __init__(self) -> None:
        super().__init__()
        self.average = Average()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(x - self.average.update(x), ids)


class HelpedInPlace(Helped):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.average.value.add_(x.detach().mean(0))
        return self.answer(x - self.average.value, ids)


class HelpedInAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.averages = [Average(), (Average(),), {"a": Average()}]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x - self.averages[0].update(x) - self.averages[1][0].update(x)
        return self.answer(x - self.averages[2]["a"].update(x), ids)


class Slotted:
    __slots__ = ("updates",)

    def __init__(self) -> None:
        self.updates = 0


class HelpedBySlots(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Slotted()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.counter.updates += 1
        return self.answer(x, ids) * self.counter.updates


class Settings(Base):
    def __init__(self) -> None:
        super().__init__()
        self.args = argparse.Namespace(steps=0, inner=argparse.Namespace(last=None))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.args.steps += 1
        self.args.inner.last = x.shape[1]
        return self.answer(x, ids) / self.args.steps


class Queue(Base):
    def __init__(self) -> None:
        super().__init__()
        self.queue = collections.deque([0.0], maxlen=2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.queue.append(self.queue[-1] + 1)
        return self.answer(x, ids) + sum(self.queue)


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counter = collections.Counter(calls=1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.counter["calls"] += 1
        return self.answer(x, ids) * self.counter["calls"]


class NumpyCounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.answer(x, ids) * float(self.counts[0])


class OfTheClass(Base):
    calls = 0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        OfTheClass.calls += 1
        return self.answer(x, ids)


class GlobalList(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        CALLS.append(1)
        return self.answer(x, ids)


class GlobalDict(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        STATS["calls"] += 1
        return self.answer(x, ids)


class GlobalNumber(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        global TOTAL
        TOTAL += 1
        return self.answer(x, ids) + TOTAL


class GlobalTensor(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        SEEN.add_(1)
        return self.answer(x, ids) + SEEN


class Prints(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        print("forward")
        return self.answer(x, ids)


class Target(Base):
    """A slow copy of a layer, that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.layer).requires_grad_(False)
        with torch.no_grad():
            self.target.weight.mul_(0.5)

    def follow(self) -> None:
        self.target.weight.data.mul_(0.9).add_(self.layer.weight.data, alpha=0.1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.follow()
        return self.answer(x, ids) + self.target(x)


class TargetDetached(Target):
    def follow(self) -> None:
        self.target.weight.detach().lerp_(self.layer.weight.detach(), 0.1)


class TargetNoGrad(Target):
    def follow(self) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.layer.parameters(), strict=True):
                slow.copy_(slow * 0.9 + fast * 0.1)


class TargetForeach(Target):
    def follow(self) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(self.target.parameters()), 0.9)


class TargetRow(Target):
    def follow(self) -> None:
        self.target.weight.data[0].mul_(0.5)
        self.table.weight.data[0].zero_()


class TargetData(Target):
    def follow(self) -> None:
        self.target.weight.data = self.target.weight.data * 0.9


class TargetSet(Target):
    def follow(self) -> None:
        self.target.weight.data.set_(self.target.weight.data * 0.9)


class TargetSwapped(Target):
    def follow(self) -> None:
        self.target.weight = nn.Parameter(self.target.weight.detach() * 0.9, requires_grad=False)


class TargetLoaded(Target):
    def follow(self) -> None:
        self.target.load_state_dict({k: v * 0.9 for k, v in self.target.state_dict().items()})


class TargetNumpy(Target):
    def follow(self) -> None:
        self.target.weight.detach().numpy()[:] *= 0.9


class TargetByData(Target):
    """Decays by a number that depends on data, so that nothing of it is a graph."""

    def follow(self) -> None:
        if float(self.layer.weight.sum()) > -100:
            self.target.weight.data.mul_(0.9)


class Decays(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.99)
        return self.answer(x, ids)


class Clamps(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(min=0)
        return self.answer(x, ids)


class Renorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, max_norm=0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(x, ids)


class Registers(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.full((2,), 0.5))
        return self.answer(x, ids) + self.shift


class Lazily(Base):
    """Makes a plain attribute at the first call."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if getattr(self, "first", None) is None:
            self.first = x.detach().mean(0)
        return self.answer(x - self.first, ids)


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.norm(self.answer(x, ids))


class EditsInput(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x.mul_(2)
        return self.answer(x, ids)


class EditsInputByView(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x[:, 0].zero_()
        x.data[:, 1].add_(1)
        ids.detach().clamp_(max=5)
        return self.answer(x, ids)


class Drops(Base):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.answer(x, ids), 0.5, self.training)


class Busy(nn.Module):
    """Depends on data, and does everything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(3))
        self.calls, self.rows, self.average, self.last = 0, [0], Average(), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > -1e6:
            self.calls += 1
        self.rows.append(self.calls)
        self.seen += 1
        self.last = self.last + x.detach().mean(0)
        self.weight.data.mul_(0.9)
        return x * self.weight + self.average.update(x) + self.seen + self.calls + self.last


class HoldsBusy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.busy = Busy()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(self.busy(x), ids)


class Hooked(Base):
    """A hook on a part, that counts in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, args, out: self.found.append(1))
        self.found: list[int] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(x, ids)


class HookedOutside(Base):
    def __init__(self) -> None:
        super().__init__()
        found: list[int] = []
        self.layer.register_forward_hook(lambda module, args, out: found.append(1))
        self.found = found

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(x, ids)


class HookedGlobally(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(_count)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.answer(x, ids)


def _count(module: nn.Module, args: Any, out: Tensor) -> None:
    CALLS.append(1)


class RootHooked(HookedOutside):
    def __init__(self) -> None:
        Base.__init__(self)
        self.found: list[int] = []
        found = self.found
        self.register_forward_pre_hook(lambda module, args: found.append(1))


class Chosen(Base):
    """Every other call is another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.even = True

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.even = not self.even
        return self.answer(x, ids) if self.even else self.answer(-x, ids)


MODELS = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Base)][1:]


def inputs(batch: int = 5) -> tuple[Tensor, Tensor]:
    seed_started(batch)
    return torch.randn(batch, 3), torch.randint(0, 7, (batch,))


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a forward could change, as plain values: what tensors hold, and Python's attributes and globals."""
    found: dict[str, Any] = {}
    _walk("", vars(model), found, set())
    found["globals"] = (list(CALLS), dict(STATS), TOTAL, SEEN.tolist(), OfTheClass.calls)
    found["random"] = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    return found


def identities(model: nn.Module) -> dict[str, Any]:
    """Which objects the model holds, where their memory is, and how often tensors were written."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]:
            found[f"{path}.{name}"] = id(value)
            if isinstance(value, Tensor):
                found[f"{path}.{name}!"] = (value.data_ptr(), value._version, value.grad_fn, value.requires_grad)
    found["seen"] = SEEN._version
    return found


def _walk(path: str, value: Any, found: dict[str, Any], above: set[int]) -> None:
    if id(value) in above or (path.endswith("hooks") and not path.count(".")):
        return
    above = above | {id(value)}
    if isinstance(value, Tensor):
        found[path] = (tuple(value.shape), value.dtype, value.detach().reshape(-1).tolist(), value.requires_grad)
    elif isinstance(value, np.ndarray):
        found[path] = value.tolist()
    elif isinstance(value, dict):
        found[path] = len(value)
        for key, item in value.items():
            _walk(f"{path}.{key}", item, found, above)
    elif isinstance(value, (list, tuple, collections.deque)):
        found[path] = len(value)
        for key, item in enumerate(value):
            _walk(f"{path}.{key}", item, found, above)
    elif isinstance(value, Slotted):
        found[path] = value.updates
    elif isinstance(value, (int, float, str, type(None))):
        found[path] = value
    elif isinstance(value, nn.Module) or (hasattr(value, "__dict__") and not callable(value)):
        _walk(path, vars(value), found, above)
