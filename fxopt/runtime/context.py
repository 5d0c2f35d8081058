"""The ambient state of a call: what forbids running a capture, and what a capture depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import _C
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext


def is_traced() -> bool:
    """Whether someone watches or transforms the operators of this call, and must see the original forward:
    torch.compile, torch.export, make_fx, functorch (vmap, grad), forward-mode
    autograd, torch.jit.trace, a dispatch or function mode."""
    return bool(
        torch.compiler.is_compiling()
        or _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or (_C._len_torch_function_stack() and not _only_default_device())
    )


def ambient() -> tuple:
    """Global state that changes what operators compute, or (grad mode) which rewrites are valid.

    Equal tuples allow the same capture.
    """
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _autocast() if _C._is_any_autocast_enabled() else None,
        torch.get_default_device() if _C._len_torch_function_stack() else None,
    )


def _autocast() -> tuple:
    devices = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


def _only_default_device() -> bool:
    """torch.set_default_device and `with torch.device(...)` are function modes that only name a device."""
    stack = map(_C._get_function_stack_at, range(_C._len_torch_function_stack()))
    return all(type(mode) is DeviceContext for mode in stack)


@contextmanager
def saving_as_usual() -> Iterator[None]:
    """Without the caller's saved_tensors_hooks: torch.utils.checkpoint counts what is saved for its backward, which
    the backwards of a capture are not."""
    hooks = []
    while top := _C._autograd._top_saved_tensors_default_hooks(False):
        hooks.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _C._autograd._push_saved_tensors_default_hooks(pack, unpack)
