"""Autograd below what it documents: recorded switches of gradients, hooks on what is saved and on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as making_no_views  # views in here are tensors of their own
from torch._C import _autograd
from torch._C import _current_graph_task_id as running_backward  # its number, -1 outside of any
from torch._C import _set_grad_enabled as set_grad_enabled
from torch.autograd import Variable
from torch.utils.checkpoint import _checkpoint_hook
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

from fxopt.torch_internals.dynamo import as_written

hooks_of = Tensor._backward_hooks.__get__  # type: ignore[union-attr]  # what Tensor.register_hook adds to


def hooks_on_saved_tensors() -> tuple[Any, Any] | None:
    """The innermost saved_tensors_hooks of the moment, None without; torch.utils.checkpoint works by them."""
    return _autograd._top_saved_tensors_default_hooks(False)


class Checkpoint(NamedTuple):
    """frame: of one call of torch.utils.checkpoint, by identity; recomputation: which one runs, None in the forward."""

    frame: Any
    recomputation: Any


def checkpoint_of(hooks: tuple[Any, Any]) -> Checkpoint | None:
    """The checkpoint whose hooks these are; None of hooks of another kind."""
    pack: Any = as_written(hooks[0]) if isinstance(hooks[0], FunctionType) else None
    if pack is None or pack.__module__ != _checkpoint_hook.__module__:
        return None
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "target_frame_ref" in held:
        return Checkpoint(held["target_frame_ref"].cell_contents(), held["gid"].cell_contents)
    return Checkpoint(held["frame"].cell_contents, None) if "frame" in held else None


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Calls it once the running backward is through, on the streams of its caller. A failed one drops it uncalled."""
    Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


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
