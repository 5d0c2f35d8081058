"""Hashable stand-ins for what operators are called with."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.torch_internals.symbols import expression


def frozen(value: Any) -> Any:
    """A hashable stand-in; numbers keep their type, since 1, 1.0 and True mean different things to torch."""
    if isinstance(value, list | tuple):
        return (type(value), *map(frozen, value))
    if isinstance(value, dict):
        return tuple((key, frozen(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", frozen(value.start), frozen(value.stop), frozen(value.step))
    return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)


def form(value: Any) -> Any:
    """A fake value by all that the dtype, the sizes and the strides of a result depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(map(form, value.shape)), tuple(map(form, value.stride()))
    return expression(value) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else frozen(value)
