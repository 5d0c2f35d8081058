"""Tensors to time a region on, made from the fake values that its inputs have in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree

from fxopt.shape.rows import batch_symbol
from fxopt.shape.sizes import expression
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.symbols import hints_of

Sizes = Mapping[sympy.Symbol, int]
_MOST_BYTES = 1 << 28  # of all inputs; a region that reads whole tables is not copied to be timed


class NoSample(Exception):
    """A value that cannot be made up; the text says why."""


def sizes_of(values: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Every symbol in the values, with the size that it had while the model was captured."""
    sizes: dict[sympy.Symbol, int] = {}
    for size in _sizes(values):
        for symbol in expression(size).free_symbols:
            hint = hints_of(size).get(symbol)
            if hint is None:
                raise NoSample("its sizes depend on data")
            sizes[symbol] = int(hint)
    return sizes


def batches_of(values: Sequence[Any], sizes: Sizes) -> set[sympy.Symbol]:
    """The batch, and what is as large as it: 26 * s1 // s0 columns are 26 only where s1 is s0, and nobody said so."""
    batch = batch_symbol(values)
    found = {batch} if batch is not None else set()
    for term in map(expression, _sizes(values)):
        for symbol in term.free_symbols if batch in term.free_symbols else ():
            if sizes[symbol] == sizes[batch] and term.subs(symbol, batch).is_number:
                found.add(symbol)
    return found


def _sizes(values: Sequence[Any]) -> list[torch.SymInt]:
    found: list[torch.SymInt] = []
    for value in pytree.tree_leaves(list(values)):
        every = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        found += [size for size in every if isinstance(size, torch.SymInt)]
    return found


def sample(values: Sequence[Any], sizes: Sizes, least: int = 0) -> list[Any]:
    """Random tensors and ints in place of fake ones; a real tensor, a constant of the graph, is itself.

    Floats in [0.1, 1.1): neither NaN after sqrt and log nor slow as denormals. Integers are `least` or one more: tables
    have 0 and 1. In one dim they grow, and start at 0 where that is the least, as the offsets of bags do.
    """
    needed = sum(
        _number(value.numel(), sizes) * value.element_size()
        for value in pytree.tree_leaves(list(values))
        if isinstance(value, FakeTensor)
    )
    if needed > _MOST_BYTES:
        raise NoSample(f"its inputs take {needed >> 20} MiB")
    return [pytree.tree_map(lambda leaf: _made(leaf, sizes, least), value) for value in values]


def _made(value: Any, sizes: Sizes, least: int) -> Any:
    if isinstance(value, torch.SymInt):
        return _number(value, sizes)
    if not isinstance(value, FakeTensor):
        return value
    shape, strides = ([_number(size, sizes) for size in each] for each in (value.shape, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if 0 in strides:  # expanded: its elements share memory
        own = [size if stride else 1 for size, stride in zip(shape, strides, strict=True)]
        made = made.as_strided(own, strides)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        made.copy_(torch.rand(made.shape, dtype=torch.float32, device="cpu") + 0.1)
    else:
        made.copy_(_integers(made.shape, least))
    return made.expand(shape)


def _integers(shape: Sequence[int], least: int) -> torch.Tensor:
    made = torch.randint(least, least + 2, shape, device="cpu")
    if made.dim() == 1:
        made = made.sort().values
        made[:1] = least
    return made


def _number(size: int | torch.SymInt, sizes: Sizes) -> int:
    return size if isinstance(size, int) else int(expression(size).subs(sizes))
