"""What nn.MultiheadAttention and nn.TransformerEncoderLayer compute for inference, unless they are traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn


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
