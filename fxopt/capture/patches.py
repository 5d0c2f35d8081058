"""What is changed in torch for the time of a trace. Other threads see no difference."""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.capture.errors import CaptureError
from fxopt.capture.settings import OBLIVIOUS, change, changed_here
from fxopt.capture.shape_env import TraceShapeEnv

_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they log what we handle


def patch(shape_env: TraceShapeEnv) -> None:
    """Make torch as a trace needs it, until the trace ends.

    - meta["tensor_meta"] takes 40% of a trace and nobody here reads it;
    - Tensor.contiguous() asks is_contiguous() before it reaches a mode, which guards on sizes of 1;
    - a copy into a tensor, as x[:, 1:] = y makes, asks whether the tensor's elements share memory, which guards on no
      rows and on one: only a stride of 0 can say so;
    - an autograd.Function would be inlined, and its backward lost: stop there;
    - a seed would be set once, and not in every call: stop there;
    - len(x) must be an int to Python, which would fix the batch: it is x.shape[0].
    """
    original, here = proxy_tensor._extract_tensor_metadata, threading.get_ident()

    def extract(tensor: torch.Tensor, *args: Any) -> Any:
        return None if threading.get_ident() == here else original(tensor, *args)

    overlap = torch._debug_has_internal_overlap

    def overlaps(tensor: torch.Tensor) -> int:
        too_hard = threading.get_ident() == here and isinstance(tensor, FakeTensor) and not _has_strides_of_0(tensor)
        return 2 if too_hard else overlap(tensor)

    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and torch.is_grad_enabled():
            raise CaptureError(f"{cls.__name__}.apply: a graph of the forward does not keep its backward")
        return apply.__get__(None, cls)(*args, **kwargs)

    length = builtins.len

    def symbolic_length(x: Any, /) -> Any:
        if isinstance(x, FakeTensor) and threading.get_ident() == here and shape_env.symbolic_len and x.dim():
            shape_env.gave_len |= isinstance(x.shape[0], torch.SymInt)
            return x.shape[0]
        return length(x)

    changes = [
        (proxy_tensor, "_extract_tensor_metadata", extract),
        (FakeTensor, "contiguous", _contiguous),
        (torch, "_debug_has_internal_overlap", overlaps),
        (torch.autograd.Function, "apply", classmethod(refuse)),
        (torch.random, "default_generator", _Unseeded(torch.default_generator)),
        (builtins, "len", symbolic_length),
        OBLIVIOUS,
    ]
    for noisy in _NOISY:
        logging.getLogger(noisy).addFilter(_quiet)  # once, and for ever
    change(changes)


def _quiet(record: logging.LogRecord) -> bool:
    """What a trace of this thread logs is kept back."""
    return not changed_here()


def leaves_fused(kind: type[nn.Module]) -> bool:
    """Whether the nn.MultiheadAttention or nn.TransformerEncoderLayer that is running would take its operator for
    inference, were it not traced.

    It has asked for overrides of these tensors last, which a trace has, before it would look for gradients.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not kind.forward.__code__:
        frame = frame.f_back
    tensors = frame.f_locals.get("tensor_args", ()) if frame is not None else ()
    needed = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    return bool(tensors) and not needed


def as_fused(attend: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """F.multi_head_attention_forward, of [L, B, E], as the operator for inference computes it.

    Its result is contiguous as [B, L, E], which what comes next may need, and NaN where all keys are masked, as where
    weights are asked for.
    """
    result, weights = attend(*args, **{**kwargs, "need_weights": True})
    result = result.transpose(0, 1).contiguous().transpose(0, 1)
    return result, weights if kwargs["need_weights"] else None


def refuse_to_print(*args: Any, **kwargs: Any) -> None:
    raise CaptureError("prints, which a graph would not do again")


class _Unseeded:
    """A generator whose state this thread may not set."""

    def __init__(self, generator: torch.Generator):
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self._thread:
            raise CaptureError("sets torch's random state, which a graph would do only once")
        return getattr(self._generator, name)


def _contiguous(self: Any, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    if not isinstance(self.fake_mode.shape_env, TraceShapeEnv):
        return torch.Tensor.contiguous(self, memory_format=memory_format)
    return torch.ops.aten.contiguous.default(self, memory_format=memory_format)


def _has_strides_of_0(tensor: torch.Tensor) -> bool:
    return any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())
