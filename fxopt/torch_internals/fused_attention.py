"""What torch's attention and transformers compute for inference, unless they are traced, and what they ask of data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.modules.transformer as transformer
from torch import nn
from torch.utils._device import DeviceContext

from fxopt.torch_internals.modes import is_device_named

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def leaves_fused(kind: type[nn.Module]) -> bool:
    """Whether the nn.MultiheadAttention or nn.TransformerEncoderLayer that is running would take its operator for
    inference, were it not traced.

    It has asked for overrides of these tensors last, which a trace has, before it would look for gradients.
    """
    frame = _frame_of(kind.forward.__code__)
    tensors = frame.f_locals.get("tensor_args", ()) if frame is not None else ()
    asked = _has_overrides() or _needs_gradients(t for t in tensors if isinstance(t, torch.Tensor))
    return bool(tensors) and not asked


def asks_for_hint() -> bool:
    """Whether an nn.TransformerEncoder or a decoder is asking if its mask is the causal one.

    The answer goes to its layers beside the mask, and those of torch let a kernel make the mask by itself. "No" is
    always right for them. Other layers may do anything with the answer.
    """
    frame = _frame_of(transformer._detect_is_causal_mask.__code__)
    owner = frame.f_back.f_locals.get("self") if frame is not None and frame.f_back is not None else None
    layers = list(getattr(owner, "layers", ()))
    return bool(layers) and all(
        type(layer) in _LAYERS and type(layer.self_attn) is nn.MultiheadAttention for layer in layers
    )


def may_nest(encoder: nn.Module) -> bool:
    """Whether it is an nn.TransformerEncoder that may leave padding out, by tensors that are nested."""
    if not isinstance(encoder, nn.TransformerEncoder) or type(encoder).forward is not nn.TransformerEncoder.forward:
        return False
    nested: bool = getattr(encoder, "use_nested_tensor", False)
    return nested and all(type(layer) is nn.TransformerEncoderLayer for layer in encoder.layers)


def nests(encoder: Any, src: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether an encoder that `may_nest` would leave padding out, were it not traced: for inference.

    Raises:
        ValueError: its layers disagree, and some of them would not take what is nested.
    """
    if not torch.backends.mha.get_fastpath_enabled() or src.dim() != 3 or mask is not None or _has_overrides():
        return False
    busy = [layer.training or _needs_gradients(layer.parameters()) for layer in encoder.layers]
    if busy[0] or _needs_gradients([src]):
        return False
    if any(busy):
        raise ValueError("its first layer alone is for inference")
    return True


def _has_overrides() -> bool:
    """Whether a default device is named. That is a function mode, and then torch takes no operator for inference."""
    return is_device_named() or _frame_of(DeviceContext.__torch_function__.__code__) is not None


def _needs_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _frame_of(code: CodeType) -> FrameType | None:
    """The innermost call of it that is running in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def as_fused(attend: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """F.multi_head_attention_forward, of [L, B, E], as the operator for inference computes it.

    Its result is contiguous as [B, L, E], which what comes next may need, and NaN where all keys are masked, as where
    weights are asked for.
    """
    result, weights = attend(*args, **{**kwargs, "need_weights": True})
    result = result.transpose(0, 1).contiguous().transpose(0, 1)
    return result, weights if kwargs["need_weights"] else None
