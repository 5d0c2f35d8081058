"""nn.TransformerEncoder for inference, some of whose rows are padding.

Where all padding is at the ends of its rows, torch leaves it out: it makes a nested tensor of the rest, and zeros of
what is missing at the end. A trace keeps the padding, which the other rows do not see, and makes the same zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxopt.capture.errors import CaptureError
from fxopt.capture.state import ModelCopy
from fxopt.torch_internals.fused_attention import may_nest, nests
from fxopt.torch_internals.modes import is_any_autocast_enabled


def keep_padding(copy: ModelCopy) -> None:
    """From now on the encoders of a traced copy make no nested tensors."""
    for _, module in copy.modules():
        if may_nest(module):
            kind = type(module)
            own = {"forward": _forward, "use_nested_tensor": property(lambda encoder: False)}
            module.__class__ = type(kind.__name__, (kind,), own)


def _forward(
    self: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    try:
        nested = src_key_padding_mask is not None and nests(self, src, mask)
    except ValueError as error:
        raise CaptureError(f"has padding, and {error}") from None
    if src_key_padding_mask is None or not nested:
        return nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)
    if src_key_padding_mask.dtype != torch.bool or is_any_autocast_enabled():
        raise CaptureError("leaves out padding by a mask of floats, or under autocast")
    padding, zeros = _padding(src_key_padding_mask, getattr(self, "mask_check", True))
    for layer in self.layers:
        src = layer(src, src_key_padding_mask=padding)
    src = src.masked_fill(zeros.unsqueeze(-1), 0.0)
    return src if self.norm is None else self.norm(src)


def _padding(given: Tensor, checked: bool) -> tuple[Tensor, Tensor]:
    """What the layers do not see, [B, L], and where zeros stand in the end. Unless it is checked, it is taken for
    granted that padding is at the ends."""
    lengths = given.logical_not().sum(1, keepdim=True)
    torch._check(lengths.sum().item() > 0)  # else nothing is left, and eager raises
    ends = torch.arange(given.shape[1], device=given.device) >= lengths
    return (given, given & (ends == given).all()) if checked else (ends, ends)
