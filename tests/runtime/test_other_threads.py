"""Other threads while one captures: their calls, their training of the same model, their own tracing."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch as python_dispatch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fxopt
from fxopt.runtime import dispatcher_of
from tests.runtime.midway import midway

CONFIG = fxopt.Config(tune="off", verify="off")


class Attended(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.MultiheadAttention):
        super().__init__()
        self.attention = kind(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0] + x


class Own(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return out * 2, weights


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Drawing(nn.Module):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def forward(self, x):
        return torch.cat([self.Twice.apply(row) for row in x]) + len(x)


SERVED: dict[str, Callable[[], nn.Module]] = {
    "attention": Attended,
    "a subclass of it": lambda: Attended(Own),
    "an encoder": Encoder,
    "layers": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "recurrent": lambda: nn.GRU(8, 4, batch_first=True),
    "len and a function": Drawing,
}


class Pause:
    """Runs `meanwhile` in another thread, from beginning to end, once."""

    def __init__(self, meanwhile: Callable[[], Any]):
        self._meanwhile, self.over, self.result = meanwhile, False, None

    def __call__(self) -> None:
        if not self.over:
            self.over = True
            with ThreadPoolExecutor(1) as pool:
                self.result = pool.submit(self._meanwhile).result(timeout=120)


class Paused(nn.Module):
    """Captured with a pause at its relu."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(x).relu() + len(x)


def captured_while(meanwhile: Callable[[], Any]) -> tuple[nn.Module, Any]:
    pause = Pause(meanwhile)
    with midway(torch.Tensor.relu, pause):
        fast = fxopt.optimize(Paused().eval(), (torch.randn(3, 8),), CONFIG)
    assert pause.over
    return fast, pause.result


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_calls_find_their_entry(name, grad):
    model, x = SERVED[name]().eval(), torch.randn(4, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        fast = fxopt.optimize(model, config=CONFIG)
        dispatcher_of(fast).prepare((x,))  # with gradients also in eval mode
    before = dispatcher_of(fast).entries

    def serve() -> Any:
        with torch.set_grad_enabled(grad):
            return fast(x)

    busy, result = captured_while(serve)
    torch.testing.assert_close(result, expected)
    assert dispatcher_of(fast).entries == before and dispatcher_of(busy).entries[0].executable is not None


def refused(log: logging.Logger) -> bool:
    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    log.warning("from another thread")
    log.removeHandler(handler)
    return not records


def fakes() -> tuple:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        return x.contiguous() is x, x.t().contiguous().stride(), len(x)


def without_modes() -> bool:
    """As torch.compile does while it traces."""
    with python_dispatch._disable_current_modes():
        return torch.ones(2).add(1).sum().item() == 4


MEANWHILE: dict[str, tuple[Callable[[], Any], Any]] = {
    "fake tensors": (fakes, (True, (2, 1), 2)),
    "logs": (lambda: refused(logging.getLogger("torch.fx.experimental.symbolic_shapes")), False),
    "levels": (lambda: logging.getLogger("torch._subclasses.fake_tensor").getEffectiveLevel() < 50, True),
    "modes": (without_modes, True),
    "saved": (lambda: saved_by_hooks(), 2.0),
    "seeds": (lambda: torch.Generator().manual_seed(3).initial_seed(), 3),
    "forward": (lambda: nn.MultiheadAttention.forward.__module__, "torch.nn.modules.activation"),
    "functions": (lambda: torch.overrides.has_torch_function((torch.ones(1),)), False),
    "oblivious": (lambda: torch.fx.experimental._config.backed_size_oblivious, False),
    "make_fx": (
        lambda: len(torch.fx.experimental.proxy_tensor.make_fx(torch.add)(*[torch.ones(2)] * 2).graph.nodes),
        4,
    ),
    "metadata": (lambda: torch.fx.experimental.proxy_tensor._extract_tensor_metadata(torch.ones(2, 3)).shape, (2, 3)),
    "overlaps": (lambda: torch._debug_has_internal_overlap(torch.ones(1).expand(2)), 1),
    "symbolic_trace": (lambda: len(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph.nodes), 3),
    "script": (lambda: torch.jit.script(lengths)(torch.ones(4, 2)), 4),
    "gradients": (lambda: torch.ones(2, requires_grad=True).mul(2).sum().backward(), None),
    "pickles": (lambda: pickle.loads(pickle.dumps(torch.ones(2))).sum().item(), 2.0),
}


def saved_by_hooks() -> float:
    x = torch.full((), 3.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor - 2, lambda tensor: tensor):
        y = x * x
    y.backward()
    return x.grad.item()


def lengths(x: torch.Tensor) -> int:
    return len(x)


@pytest.mark.parametrize("name", MEANWHILE)
def test_torch_is_as_ever(name):
    meanwhile, expected = MEANWHILE[name]
    if name == "oblivious" and torch.__version__ < "2.13":
        pytest.skip("its settings are the process's")
    fast, found = captured_while(meanwhile)
    assert found == expected
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), dispatcher_of(fast).original(x))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None and entry.findings.eager_reason == ""


def _train(model: Paused) -> None:
    model.train()


def _double(model: Paused) -> None:
    model.double()


def _assign(model: Paused) -> None:
    model.load_state_dict({k: v.clone() + 1 for k, v in model.state_dict().items()}, assign=True)


def _load(model: Paused) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def _hook(model: Paused) -> None:
    model.inner[2].register_forward_hook(lambda module, args, out: out * 3)


def _replace(model: Paused) -> None:
    model.inner[0] = nn.Linear(8, 8, bias=False)


def _attribute(model: Paused) -> None:
    model.inner[1].momentum = 0.9
    model.inner[1].eps = 3.0


def _append(model: Paused) -> None:
    model.inner.append(nn.Tanh())


def _prune(model: Paused) -> None:
    nn.utils.parametrize.register_parametrization(model.inner[0], "weight", nn.Tanh())


def _tie(model: Paused) -> None:
    model.inner[2].weight = model.inner[0].weight


def _step(model: Paused) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


EDITS = [_train, _double, _assign, _load, _hook, _replace, _attribute, _append, _prune, _tie, _step]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("when", ["while it is traced", "behind the trace", "behind the trace, verified"])
def test_the_model_is_changed_meanwhile(monkeypatch, edit, when):
    """The capture is of the model as it is afterwards, or is dropped."""
    model = Paused().eval()
    pause = Pause(lambda: edit(model))
    if when != "while it is traced":
        pipeline = sys.modules["fxopt.optimize"]
        rewrite = pipeline.rewrite

        def after(*args: Any) -> Any:
            pause()
            return rewrite(*args)

        monkeypatch.setattr(pipeline, "rewrite", after)
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off", verify="first" if "verified" in when else "off"))
    traced = midway(torch.Tensor.relu, pause) if when == "while it is traced" else contextlib.nullcontext()
    with traced, contextlib.suppress(RuntimeError) if edit is _double else contextlib.nullcontext():
        fast(torch.randn(3, 8))  # eager meets its new dtype
    assert pause.over
    wide = model.inner[2].weight.dtype
    for rows in (4, 2, 7, 4):
        x = torch.randn(rows, 8, dtype=wide)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        expected = model(x)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        torch.testing.assert_close(fast(x), expected)
    assert dispatcher_of(fast).entries[0].executable is not None or edit is _hook


@pytest.mark.parametrize("config", [CONFIG, fxopt.Config()], ids=["unchecked", "default"])
def test_many_models_and_signatures_at_once(config):
    makers = [Attended, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), lambda: nn.GRU(8, 4, batch_first=True)]
    models = [maker().eval() for maker in makers]
    drop_ins = [fxopt.optimize(model, config=config) for model in models]
    inputs = [torch.randn(3, 2, 8), torch.randn(3, 2, 8).double()]
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait(60)
        for turn in range(4):
            grad, model, fast = (number + turn) % 2 == 0, models[number % 3], drop_ins[number % 3]
            with torch.set_grad_enabled(grad):
                x = inputs[0] * (turn + 1)
                torch.testing.assert_close(fast(x), model(x))

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result(timeout=300)
    assert [len(dispatcher_of(fast).entries) for fast in drop_ins] == [2, 2, 2]


@pytest.mark.parametrize("same", [False, True])
def test_a_lock_of_the_users_that_a_forward_takes(monkeypatch, same):
    """One thread holds it around a call, the other takes it in a forward that is traced: neither waits for ever."""
    monkeypatch.setattr("fxopt.capture.trace.WAIT", 1)
    monkeypatch.setattr("fxopt.runtime.dispatch.WAIT", 1)
    theirs = threading.Lock()

    class Locking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            if isinstance(x, FakeTensor):
                if tracing.locked():
                    tracing.release()
                assert theirs.acquire(timeout=60)
                theirs.release()
            return self.layer(x)

    tracing, x = threading.Lock(), torch.randn(3, 8)
    tracing.acquire()
    first, other = fxopt.optimize(Locking(), config=CONFIG), fxopt.optimize(nn.Linear(8, 8), config=CONFIG)

    def hold() -> None:
        with theirs:
            held.set()
            tracing.acquire(timeout=60)
            (first if same else other)(x)

    held = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        held.wait(60)
        calling = pool.submit(first, x)
        holding.result(timeout=120)
        calling.result(timeout=120)
    assert dispatcher_of(first).entries[0].executable is not None
    other(x)
    assert dispatcher_of(other).entries[0].executable is not None


def test_what_threads_share_is_used_as_in_eager():
    """A copy of an event would never be set, and a copy of a queue would keep what another thread has taken."""
    event, queue = threading.Event(), Queue()
    queue.put(torch.ones(()))

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ready, self.items, self.layer = event, queue, nn.Linear(3, 2)

        def forward(self, x):
            assert self.ready.wait(60)
            return self.layer(x) + self.items.queue[0]

    model, x = Waiting(), torch.randn(4, 3)
    fast = fxopt.optimize(model, config=CONFIG)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fast, x)
        time.sleep(0.2)
        event.set()
        torch.testing.assert_close(result.result(timeout=30), model(x))
    assert event.is_set() and queue.qsize() == 1
    (entry,) = dispatcher_of(fast).entries
    assert "uses Event" in entry.findings.eager_reason
