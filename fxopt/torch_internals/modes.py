"""What of this thread's state torch keeps in C++: stacks of modes, function transforms, autocast."""

from __future__ import annotations

import threading

import torch
import torch._ops as ops
from torch import _C
from torch._C import DisableTorchFunction as no_function_modes
from torch._C import _get_tracing_state as tracing_state
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C import _PreserveDispatchKeyGuard as dispatch_keys_kept
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._C._functorch import peek_interpreter_stack as functorch_level
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

AUTOCAST = (_enter_autocast, _exit_autocast)  # what torch.autocast tells a tracer
_KEYS = tuple(_C._TorchDispatchModeKey.__members__.values())


def is_traced() -> bool:
    """Whether someone watches or transforms the operators of this call, and must see the original forward:
    torch.compile, torch.export, or what `is_transformed` tells."""
    return is_compiling() or is_transformed()


def is_transformed() -> bool:
    """Whether something else than a compiler watches or transforms the operators of this call: make_fx, functorch
    (vmap, grad), forward-mode autograd, torch.jit.trace, a dispatch or function mode."""
    return bool(
        dispatch_modes()
        or functorch_level() is not None
        or tracing_state() is not None
        or forward_ad._current_level >= 0
        or (function_modes() and not _only_default_device())
    )


def _only_default_device() -> bool:
    """torch.set_default_device and `with torch.device(...)` are function modes that only name a device."""
    return all(type(mode) is DeviceContext for mode in _function_stack())


def is_device_named() -> bool:
    """Whether one of the two is in force. One that calls a torch function is not, as long as that runs."""
    return DeviceContext in map(type, _function_stack())


def _function_stack() -> list[object]:
    return [_C._get_function_stack_at(place) for place in range(function_modes())]


class Modes:
    """The modes of this thread as they are now, and whether gradients are on."""

    def __init__(self) -> None:
        self._functions = _C._len_torch_function_stack()
        self._modes = [_C._get_dispatch_mode(key) for key in _KEYS]
        self._before_autograd = [ops.mode_stack_state_for_pre_dispatch().get(slot) for slot in (0, 1)]
        self._grad = torch.is_grad_enabled()

    def restore(self) -> None:
        while _C._len_torch_function_stack() > self._functions:
            _C._pop_torch_function_stack()
        for key, mode in zip(_KEYS, self._modes, strict=True):
            if _C._get_dispatch_mode(key) is not mode:
                _C._unset_dispatch_mode(key)
                if mode is not None:
                    _C._set_dispatch_mode(mode)
        for slot, mode in enumerate(self._before_autograd):
            ops.mode_stack_state_for_pre_dispatch().set(slot, mode)
        _C._set_grad_enabled(self._grad)


def modes_of_this_thread() -> None:
    """From now on torch's modes before autograd are a thread's own: a trace saw another thread's torch.compile take
    its mode away for a while, and torch.export saw ours."""
    state = ops.mode_stack_state_for_pre_dispatch()
    if not isinstance(state, threading.local) and state.count() == 0:
        ops._mode_stack_state_for_pre_dispatch = _OfThisThread()


class _OfThisThread(threading.local, ops._ModeStackStateForPreDispatch):
    pass
