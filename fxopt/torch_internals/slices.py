"""Slices, whose sizes are terms of the tensor's: torch 2.11 makes up an unknown size for `x[2:]`.

Later versions have terms too, but Min(64, L) for `positions[:L]`, where L <= 64 is all that a capture depends on. What
is cut of sizes of inputs becomes a guard here, so that `x[:, -4:]` has 4 items. torch is asked where a size depends on
data.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.symbols import expression

aten = torch.ops.aten


def slices_have_terms() -> None:
    """Once a process; it changes nothing for other fake tensors than those of our captures."""
    theirs = fake_impls.op_implementations_dict[aten.slice.Tensor]

    makes_up = torch.__version__ < "2.12"  # a TorchVersion, which compares numbers

    def sliced(mode: Any, function: Any, tensor: Any, *where: Any, **named: Any) -> Any:
        ours = None
        if isinstance(mode.shape_env, TraceShapeEnv):
            sizes = (*tensor.shape, *where, *named.values())
            if makes_up or not any(map(free_unbacked_symbols, sizes)):
                ours = sliced_by_terms(tensor, *where, **named)
        return theirs(mode, function, tensor, *where, **named) if ours is None else ours

    fake_impls.op_implementations_dict[aten.slice.Tensor] = sliced


def sliced_by_terms(tensor: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """None where it is wrong, or where the sign of an end is not known."""
    if not -tensor.dim() <= dim < tensor.dim() or step < 1:
        return None
    size = tensor.shape[dim]
    first, last = _place(size, 0 if start is None else start), _place(size, sys.maxsize if end is None else end)
    if first is None or last is None:
        return None
    length = _positive(last - first)
    sizes, strides = list(tensor.shape), list(tensor.stride())
    offset = tensor.storage_offset() + first * strides[dim]
    sizes[dim], strides[dim] = (length + step - 1) // step, strides[dim] * step
    return tensor.as_strided(sizes, strides, offset)


def _place(size: Any, index: Any) -> Any:
    """Where an index lies in a dim, from 0 to its size; None where its sign is not known."""
    if statically_known_true(index == sys.maxsize):
        return size
    if statically_known_true(index >= 0):
        return size - _positive(size - index, _is(index, 1))
    return _positive(index + size, _is(index, -1)) if statically_known_true(index < 0) else None


def _is(index: Any, number: int) -> bool:
    return isinstance(index, int) and index == number


def _positive(number: Any, of_one: bool = False) -> Any:
    """It, or 0 where it is negative. A guard tells; a term where data decide, or `x[1:]` differs for no items alone."""
    if statically_known_true(number >= 0):
        return number
    if isinstance(number, torch.SymInt) and not number.node.shape_env.asks_cuts:
        return torch.sym_max(number, 0)
    if of_one or free_unbacked_symbols(number) or not expression(number).is_polynomial():
        return torch.sym_max(number, 0)
    return number if number >= 0 else 0
