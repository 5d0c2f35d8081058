"""Whatever is raised in the middle of a capture: torch is as it was, no lock is held, the next call captures."""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import sys
import threading
import traceback
from typing import Any

import pytest
import torch
import torch._ops as ops
import torch.fx.experimental._config as shape_config
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fxopt
from fxopt.capture.trace import TRACE_LOCK
from fxopt.runtime import dispatcher_of
from fxopt.torch_internals.modes import dispatch_keys_kept
from tests.runtime.midway import midway

CONFIG = fxopt.Config(tune="off")
ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")
SHORTAGES = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), ALLOCATOR]


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(9, 4), nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x, ids):
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True) + 1
        return self.layers(torch.cat([x / scale, self.table(ids)], 1))


def example(rows: int = 5) -> tuple:
    return torch.randn(rows, 3), torch.randint(0, 9, (rows,))


def settings() -> dict[str, Any]:
    """What a capture changes for its time."""
    return {
        "len": builtins.len,
        "check": torch._check_with,
        "generator": torch.random.default_generator,
        "overlap": torch._debug_has_internal_overlap,
        "metadata": proxy_tensor._extract_tensor_metadata,
        "apply": vars(torch.autograd.function._SingleLevelFunction).get("apply"),
        "contiguous": FakeTensor.contiguous,
        "attention": nn.MultiheadAttention.forward,
        "overrides": torch.overrides.has_torch_function,
        "call": nn.Module.__call__,
        "levels": [logging.getLogger(name).level for name in ("", "torch", "torch.fx", "torch._subclasses")],
        "oblivious": shape_config.backed_size_oblivious,
        "functions": torch._C._len_torch_function_stack(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "before autograd": ops._len_torch_dispatch_stack_pre_dispatch(),
        "keys": str(torch._C._dispatch_tls_local_include_set()) + str(torch._C._dispatch_tls_local_exclude_set()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_cache_enabled(),
        "random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
    }


def free(lock: Any) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=5) and (lock.release() or True)))
    thread.start()
    thread.join()
    return got == [True]


_DEVICE = torch.ops.prim.device.default


def is_asked(frame: Any) -> bool:
    """Whether torch's C++ waits for what a symbolic size is, or on which device a fake tensor lies; or torch ends its
    fake mode, which it would lose count of."""
    while frame is not None:
        known = (*frame.f_locals.values(), *(frame.f_locals.get("args") or ()))
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("sym_node.py") or any(each is _DEVICE for each in known):
            return True
        if file.endswith("fake_tensor.py") and name == "__exit__":
            return True
        frame = frame.f_back
    return False


def calls_of(function: Any, error: BaseException | None = None, at: int = -1) -> list[str]:
    """Names of the Python functions that `function()` calls in this thread; at call number `at`, `error` is raised, or
    at the first one behind it where torch's C++ does not ask for a size or a device: there an answer must come, or the
    process ends. These have no name here."""
    names: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        here = 0 <= at <= len(names)
        names.append("" if (here or at < 0) and is_asked(frame) else frame.f_code.co_name)
        if here and names[-1]:
            sys.settrace(None)
            raise error  # type: ignore[misc]

    before = sys.gettrace()
    sys.settrace(look)
    try:
        function()
    finally:
        sys.settrace(before)
    return names


def forget(interrupt: BaseException) -> None:
    """Ends the guards of torch that the frames of a traceback hold. Where a trace function was set, Python 3.11 keeps a
    copy of the locals of each frame, and a guard in it would change dispatch keys whenever it is collected."""
    with dispatch_keys_kept():
        for frame, _ in traceback.walk_tb(interrupt.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
                frame.f_locals  # noqa: B018 (brings the copy up to date)
        gc.collect()


@pytest.fixture(scope="module")
def moments() -> list[int]:
    """Calls of a first call of a model to stop at: spread over it, and those that enter and leave something."""
    inputs = example()
    fxopt.optimize(Ranker(), inputs, CONFIG)  # imports and kernels
    fast = fxopt.optimize(Ranker(), config=CONFIG)
    names = calls_of(lambda: fast(*inputs))
    first = names.index("__init__")
    named = [at for at, name in enumerate(names) if name and at >= first]
    spread = named[:: max(1, len(named) // 12)]
    edges = ("__enter__", "__exit__", "kept", "change", "_traced", "_define", "fork_rng", "restore", "_set", "patch")
    entering = [[at for at, name in enumerate(names) if name == edge] for edge in edges]
    picked = [
        at for found in entering for at in (found[:1] + found[len(found) // 2 : len(found) // 2 + 1] + found[-1:])
    ]
    return sorted({*spread, *picked})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a generator's end
@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_anywhere(moments, part):
    model, inputs = Ranker(), example()
    expected = model(*inputs)
    reached = 0
    for at in moments[part::4]:
        fast, before = fxopt.optimize(model, config=CONFIG), settings()
        try:
            calls_of(lambda fast=fast: fast(*inputs), KeyboardInterrupt(), at)
        except KeyboardInterrupt as interrupt:
            reached += 1
            forget(interrupt)
        after = settings()
        assert after == before, (at, [name for name in before if before[name] != after[name]])
        dispatcher = dispatcher_of(fast)
        assert all(entry.executable is not None for entry in dispatcher.entries), at  # complete, or none
        assert free(TRACE_LOCK) and free(dispatcher._lock), at
        torch.testing.assert_close(fast(*inputs), expected)
        assert dispatcher.entries and dispatcher.entries[0].executable is not None, (at, dispatcher.refused)
    assert reached > len(moments[part::4]) // 2


def failing(*errors: BaseException) -> Any:
    """Traces of a Ranker raise these in its middle, one after the other."""
    left = list(errors)

    def fail() -> None:
        if left:
            raise left.pop()

    return midway(torch.Tensor.amax, fail)


@pytest.mark.parametrize("error", [*SHORTAGES, KeyboardInterrupt(), SystemExit()], ids=repr)
@pytest.mark.parametrize("inside", [False, True])
def test_what_says_nothing_about_the_model_is_not_remembered(error, inside):
    model = nn.Sequential(Both(Ranker())) if inside else Ranker()
    fast, inputs, before = fxopt.optimize(model, config=CONFIG), example(), settings()
    given = (inputs,) if inside else inputs
    with failing(error):
        if isinstance(error, Exception):
            torch.testing.assert_close(fast(*given), model(*given))
            assert any("not captured" in reason for reason in dispatcher_of(fast).refused)
        else:
            with pytest.raises(type(error)):
                fast(*given)
    assert settings() == before and not dispatcher_of(fast).entries
    torch.testing.assert_close(fast(*given), model(*given))
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is not None and not entry.executable.capture.leaves


class Both(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pair):
        return self.inner(*pair) + 1


def test_memory_that_stays_short_ends_the_attempts():
    fast = fxopt.optimize(Ranker(), config=CONFIG)
    with failing(*[MemoryError()] * 50):
        for _ in range(6):
            fast(*example())
    (entry,) = dispatcher_of(fast).entries
    assert entry.executable is None and "MemoryError" in entry.findings.eager_reason


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "where", ["fxopt.optimize.rewrite", "fxopt.optimize.verified", "fxopt.rewrites.framework.core._checked"]
)
def test_in_every_stage(monkeypatch, where, error):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    fast, inputs, before = fxopt.optimize(Ranker(), config=CONFIG), example(), settings()
    with monkeypatch.context() as patch:
        module, name = where.rsplit(".", 1)
        patch.setattr(sys.modules[module], name, fail)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                fast(*inputs)
        else:
            fast(*inputs)
    assert settings() == before and not dispatcher_of(fast).entries
    fast(*inputs)
    assert dispatcher_of(fast).entries[0].executable is not None
