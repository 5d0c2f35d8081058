"""Random tensors of another shape that look like a given one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_EXACT = 2.0**52  # from here on a float64 is no count any more


def drawn(like: Tensor, shape: Sequence[int], columns: bool, room: int, generator: torch.Generator) -> Tensor:
    """Values within the range of `like`, or around their scale, at random; half of the integers are its own.

    Args:
        columns: the last dim is one of columns, each with a range of its own.
        room: integers below this one are good, whatever `like` has; 0 where nobody knows.
    """
    if like.dtype is torch.bool:
        return (torch.rand(tuple(shape), generator=generator, device="cpu") < 0.5).to(like.device)
    if like.is_complex():
        return torch.randn(tuple(shape), dtype=like.dtype, generator=generator, device="cpu").to(like.device)
    seen = like.detach().cpu().double()
    width = max(1, seen.shape[-1]) if columns and seen.dim() > 1 else 1
    lanes = seen.reshape(-1, width) if seen.numel() else torch.zeros(1, width, dtype=torch.float64, device="cpu")
    form = (prod(shape) // width, width)
    whole = (lanes == lanes.floor()).all(0) & (lanes.abs() < _EXACT).all(0)
    if not like.is_floating_point() and not bool(whole.all()):  # too large to be counted in floats
        return like.flatten()[
            torch.randint(0, like.numel(), tuple(shape), generator=generator, device="cpu").to(like.device)
        ]
    whole &= bool(like.numel()) | (not like.is_floating_point())
    floats = _floats(lanes[:, ~whole], form, generator)
    values = torch.where(whole, _integers(lanes, form, room, generator), floats)
    return values.reshape(tuple(shape)).to(like.dtype).to(like.device)


def _integers(lanes: Tensor, shape: tuple[int, int], room: int, generator: torch.Generator) -> Tensor:
    low, high = lanes.amin(0).clamp(max=0), lanes.amax(0).clamp(min=max(1, room - 1))
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
    rows = torch.randint(0, lanes.shape[0], shape, generator=generator, device="cpu")
    own = torch.rand(uniform.shape, generator=generator, device="cpu") < 0.5
    return torch.where(own, lanes.gather(0, rows), (low + uniform * (high - low + 1)).floor().minimum(high))


def _floats(seen: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Positive where all that was seen is."""
    seen = seen[seen.isfinite()]
    if seen.any() and float(seen.min()) >= 0:
        return float(seen.max()) * (1 - torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu"))
    scale = float(seen.square().mean().sqrt()) if seen.any() else 1.0
    return scale * torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
