"""The stacks of modes that torch keeps in C++ can still be read and put back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._ops as ops
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt.torch_internals import modes
from fxopt.torch_internals.tracing import PreDispatchTorchFunctionMode, make_fx

WATCHERS = {
    "a dispatch mode": TorchDispatchMode,
    "a function mode": TorchFunctionMode,
    "forward AD": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", WATCHERS)
def test_who_watches_is_seen(name: str) -> None:
    with WATCHERS[name]():
        assert modes.is_traced(), (
            f"{name} is not noticed: fxopt/runtime/dispatch.py would serve the call behind its back"
        )
    assert not modes.is_traced(), "a plain call counts as traced: fxopt would always run eager"


TRANSFORMS: dict[str, Callable[[Callable], object]] = {
    "make_fx": lambda f: make_fx(f)(torch.ones(2)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(2)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(2)),
    "torch.jit.trace": lambda f: torch.jit.trace(f, torch.ones(2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_seen(name: str) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes.is_traced())
        return x * 2

    TRANSFORMS[name](function)
    assert seen and seen[0], f"{name} is not noticed: fxopt/runtime/dispatch.py would serve the call behind its back"


def test_a_default_device_is_no_watcher() -> None:
    with torch.device("cpu"):
        assert modes.function_modes() and not modes.is_traced(), (
            "torch.device as a mode is no DeviceContext any more: models under a default device would run eager"
        )
        assert modes.is_device_named()
    assert not modes.is_device_named()


def test_modes_are_put_back() -> None:
    before = modes.Modes()
    state = ops.mode_stack_state_for_pre_dispatch().count()
    with torch.no_grad(), modes.dispatch_keys_kept():
        make_fx(lambda x: x + 1, pre_dispatch=True)(torch.ones(2))
        TorchFunctionMode().__enter__()
        before.restore()
        found = modes.function_modes(), ops.mode_stack_state_for_pre_dispatch().count(), torch.is_grad_enabled()
    assert found == (0, state, True), (
        "modes stay after an interrupted capture: fxopt/capture/settings.py puts them back"
    )


def test_modes_before_autograd_are_the_threads() -> None:
    modes.modes_of_this_thread()
    found: list[int] = []

    def trace(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(ops.mode_stack_state_for_pre_dispatch().count()))
        thread.start()
        thread.join()
        found.append(ops.mode_stack_state_for_pre_dispatch().count())
        return x + 1

    make_fx(trace, pre_dispatch=True)(torch.ones(2))
    assert found[0] == 0 < found[1], (
        "other threads meet a trace's modes: fxopt/capture/trace.py makes them a thread's own"
    )


def test_nothing_is_asked_without_modes() -> None:
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, *args: object, **kwargs: object) -> object:
            raise AssertionError

    with Refusing(), modes.no_function_modes():
        torch.Tensor.size(torch.ones(2))
    with TorchDispatchMode(), modes.no_dispatch_modes():
        assert not modes.is_traced(), "_disable_current_modes leaves one: fxopt/capture/proofs.py would be recorded"


def test_autocast_and_wrapped_tensors_are_seen() -> None:
    wrapped = []
    torch.vmap(lambda x: wrapped.append(modes.is_functorch_wrapped_tensor(x)) or x)(torch.ones(2))
    with torch.autocast("cpu"):
        inside = modes.is_any_autocast_enabled()
    assert inside and not modes.is_any_autocast_enabled(), "autocast is not noticed: fxopt/runtime/context.py"
    assert wrapped == [True], "vmap's tensors are not noticed: fxopt/capture/trace.py would take one for a constant"


def test_many_gradients_at_once_are_seen() -> None:
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(modes.is_legacy_batchedtensor(grad))
            return grad * 2

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Watched.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [True], "is_grads_batched is not noticed: fxopt/kernels/gradients.py would give one gradient for all"


def test_autocast_tells_a_tracer(tracer: Any) -> None:
    seen = []

    class Watching(PreDispatchTorchFunctionMode):
        def __torch_function__(self, func: Callable, *args: Any) -> None:
            seen.append(func)

    with Watching(tracer), torch.autocast("cpu"):
        pass
    assert seen == list(modes.AUTOCAST), f"fxopt/capture/function_mode.py would record {seen} of torch.autocast"
