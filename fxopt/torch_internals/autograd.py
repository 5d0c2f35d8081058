"""Autograd below what it documents: recorded switches of gradients, hooks on what is saved, the keys beneath it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _autograd
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel  # type: ignore[attr-defined]
from torch._C import _set_grad_enabled as set_grad_enabled
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = ["StopRecomputation", "below_autograd", "has_kernel", "saving_as_usual", "set_grad_enabled"]


@contextmanager
def saving_as_usual() -> Iterator[None]:
    """Without the caller's saved_tensors_hooks: torch.utils.checkpoint counts what is saved for its backward, which
    the backwards of a capture are not."""
    hooks = []
    while top := _autograd._top_saved_tensors_default_hooks(False):
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
