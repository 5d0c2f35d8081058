"""State where a capture does not look for it: behind methods, in objects of C, in opaque modules of calls that fail."""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import io
import itertools
import logging
import logging.handlers
import multiprocessing
import queue
import tempfile
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize

CONFIGS = {"default": Config(), "unchecked": Config(verify="off", tune="off")}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def next(self, by: int = 1) -> int:
        self.n += by
        return self.n


def listed() -> Callable[[], int]:
    seen: list[int] = []
    note = seen.append
    return lambda: note(1) or len(seen)  # type: ignore[func-returns-value]


def defaulted() -> Callable[[], int]:
    seen: list[int] = []
    return lambda note=seen.append: note(1) or len(seen)


COUNTS: dict[str, Callable[[], Callable[[], Any]]] = {
    "method": lambda: Counter().next,
    "partial of a method": lambda: functools.partial(Counter().next, 2),
    "partial of a function": lambda: functools.partial(Counter.next, Counter()),
    "partial, by name": lambda: functools.partial(Counter.next, self=Counter()),
    "in a dict": lambda: functools.partial(dict.__getitem__({"next": Counter().next}, "next")),
    "method of a list": listed,
    "a default": defaulted,
    "iterator's method": lambda: itertools.count(1).__next__,
}


def item(values: Any) -> Any:
    values[0] += 1
    return values[0]


def attribute(local: Any) -> int:
    local.n = getattr(local, "n", 0) + 1
    return local.n


def hashed(digest: Any) -> int:
    digest.update(b"a")
    return digest.digest()[0]


def put(queue: Any) -> int:
    queue.put(1)
    return queue.qsize()


def toggled(event: threading.Event) -> bool:
    event.clear() if event.is_set() else event.set()
    return event.is_set()


def taken(semaphore: threading.Semaphore) -> int:
    semaphore.acquire()
    return semaphore._value


def written(file: Any) -> int:
    file.write("a")
    return file.tell()


def logger() -> logging.Logger:
    log, handler = logging.Logger("mine"), logging.handlers.BufferingHandler(1000)
    log.addHandler(handler)
    return log


def logged(log: logging.Logger) -> int:
    log.warning("called")
    return len(log.handlers[0].buffer)  # type: ignore[attr-defined]


def raised(variable: ContextVar) -> int:
    variable.set(variable.get() + 1)
    return variable.get()


def raised_from_nothing(variable: ContextVar) -> int:
    variable.set((variable.get(None) or 0) + 1)
    return variable.get()


def shared(number: Any) -> int:
    number.value += 1
    return number.value


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "bytearray": (lambda: bytearray(1), item),
    "array": (lambda: array.array("d", [0.0]), item),
    "memoryview": (lambda: memoryview(bytearray(1)), item),
    "ctypes": (lambda: (ctypes.c_int * 1)(0), item),
    "StringIO": (io.StringIO, written),
    "BytesIO": (lambda: io.TextIOWrapper(io.BytesIO()), written),
    "file": (functools.partial(tempfile.TemporaryFile, "w"), written),
    "temporary file": (functools.partial(tempfile.NamedTemporaryFile, "w"), written),
    "local": (threading.local, attribute),
    "hash": (hashlib.md5, hashed),
    "Queue": (queue.Queue, put),
    "SimpleQueue": (queue.SimpleQueue, put),
    "Event": (threading.Event, toggled),
    "Semaphore": (lambda: threading.Semaphore(99), taken),
    "between processes": (lambda: multiprocessing.Value("i"), shared),
    "logger": (logger, logged),
    "context variable": (lambda: ContextVar("calls", default=0), raised),
    "context variable, unset": (lambda: ContextVar("calls"), raised_from_nothing),
}


class Count(nn.Module):
    def __init__(self, count: Callable[[], Any], opaque: bool = False) -> None:
        super().__init__()
        self.count, self.opaque, self.layer = count, opaque, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu() + self.count()
        return y + 0 * y.sum().item() if self.opaque else y


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Behind(nn.Module):
    """What another object holds, and a function that changes it."""

    def __init__(self, held: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.change = held, change

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + self.change(self.held)


def answers(model: nn.Module) -> list[float]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [round(float(model(torch.rand(3 + call, 1)).sum()), 4) for call in range(4)]


def check(make: Callable[[], nn.Module], config: Config) -> None:
    torch.manual_seed(1)
    expected = answers(make())
    torch.manual_seed(1)
    assert answers(optimize(make(), config=config)) == expected


@each_config
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_behind_a_call(count: Callable[[], Callable[[], Any]], opaque: bool, config: Config) -> None:
    check(lambda: Count(count(), opaque), config)
    check(lambda: Around(Count(count(), opaque)), config)


@each_config
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_in_objects_of_c(held: tuple[Callable[[], Any], Callable[[Any], Any]], config: Config) -> None:
    make, change = held

    def enclosing() -> nn.Module:
        inside = make()
        return Count(lambda: change(inside))

    for model in (enclosing, lambda: Behind(make(), change), lambda: Around(Behind(make(), change))):
        check(model, config)


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_what_no_forward_uses_does_no_harm(held: tuple[Callable[[], Any], Callable[[Any], Any]]) -> None:
    model = Around(Around(nn.Linear(1, 1)))
    model.held = model.inner.held = held[0]()  # type: ignore[assignment]
    model.note = [].append  # type: ignore[assignment]
    fast = optimize(model, (torch.rand(3, 1),), Config(tune="off"))
    assert fast._fxopt.entries[0].executable is not None


@each_config
def test_what_only_records_has_all_calls(config: Config) -> None:
    class Recording(nn.Module):
        def __init__(self, note: Callable[[Any], None]) -> None:
            super().__init__()
            self.note = note

        def forward(self, x: Tensor) -> Tensor:
            self.note(y := x.relu())
            return y + 1

    seen: list[Any] = []
    fast = optimize(Recording(seen.append), config=config)
    for rows in (3, 4, 5, 3):
        fast(torch.randn(rows, 1))
    assert [(type(each), len(each)) for each in seen] == [(Tensor, rows) for rows in (3, 4, 5, 3)]


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.t.add_(1)
        return x + self.t + 0 * x.sum().item()


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = {"a": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        self.t["a"] += 1
        return x + self.t["a"] + 0 * x.sum().item()


class OtherData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.t.data = self.t.data + 1
        return x + self.t.detach() + 0 * x.sum().item()


class ByNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("t", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.t.numpy()[...] += 1
        return x + self.t + 0 * x.sum().item()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(1, generator=self.t).item() + 0 * x.sum().item()


class Sometimes(nn.Module):
    """Edits nothing in the calls that a capture sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("t", torch.zeros(1))
        self.held, self.count, self.seen = torch.zeros(1), 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() > 1:
            self.t += 1
            self.held.add_(1)
            self.count += 1
            self.seen.append(1.0)
        return x + self.t + self.held + self.count + len(self.seen)


@each_config
@pytest.mark.parametrize("opaque", [Sometimes, Held, InDict, OtherData, ByNumpy, Drawing])
def test_in_opaque_modules_of_calls_that_fail(opaque: type[nn.Module], config: Config) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.opaque, self.table = opaque(), nn.Embedding(5, 4)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.opaque(x) + self.table(ids)

    torch.manual_seed(0)
    eager, results = Model(), []
    torch.manual_seed(0)
    for model in (eager, optimize(Model(), config=config)):
        found: list[Any] = []
        for call, first in enumerate((0, 0, 9, 0)):
            try:
                found.append(model(torch.full((3, 4), float(call)), torch.tensor([first, 1, 2])).detach().tolist())
            except IndexError:
                found.append("IndexError")
        results.append(found)
    assert results[1] == results[0]


@each_config
def test_inputs_that_an_opaque_module_edits_by_numpy(config: Config) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.detach().numpy()[...] *= 2
            return x

    for model in (Around(Doubling()), optimize(Around(Doubling()), config=config)):
        for rows in (3, 4):
            assert model(x := torch.ones(rows, 1)).tolist() == [[4.0]] * rows
            assert x.tolist() == [[2.0]] * rows


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() and x.sum() > 0:
            self.n += 1
        return self.layer(x)


class Experts(nn.Module):
    """Opaque, in parts that are optimized."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(Expert() for _ in range(3)), nn.Linear(4, 3)

    def forward(self, h: Tensor) -> Tensor:
        chosen, out = self.gate(h).argmax(-1), torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            out[chosen == expert] = self.experts[expert](h[chosen == expert])
        return out


@pytest.mark.parametrize("seed", [27, 28, 29])
def test_experts_that_only_a_comparison_chooses_count_nothing(seed: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(3))
            self.experts, self.top = Experts(), nn.Linear(4, 1)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            h = sum(table(ids[:, k]) for k, table in enumerate(self.tables))
            return self.top(torch.relu(self.experts(h) + x) + h)

    torch.manual_seed(seed)
    model = Model().eval()
    example = torch.randn(3, 4), torch.randint(0, 20, (3, 3))
    for _ in range(3):
        optimize(model, example)
        assert not any(expert.n for expert in model.experts.experts)
