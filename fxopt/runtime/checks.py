"""What a call checks over thousands of tensors and attributes: in C++ where it was built, else in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxopt.reach.entries import item
from fxopt.runtime.native import native
from fxopt.shape.memory import Memory

PLAIN = frozenset((Tensor, nn.Parameter))
_DTYPE, _SHAPE, _DEVICE, _LAYOUT = map(attrgetter, ("dtype", "shape", "device", "layout"))


@dataclass(frozen=True)
class TensorForm:
    """What must hold of one tensor: dims are sizes, or symbols that must agree wherever they recur."""

    dtype: torch.dtype
    device: torch.device
    dims: tuple[int | str, ...]


def firsts_of(tensors: Sequence[Any]) -> list[int]:
    """For each tensor the place of the first one that is the same object."""
    places: dict[int, int] = {}
    return [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def reader() -> Callable[[list, list], list | None]:
    """``read(wheres, keys)``: ``item(where, key)`` for all pairs, or None when a key is absent; of the same two lists
    each time."""
    module = native()
    return functools.partial(module.read, module.Seen()) if module else python_read


def generation_reader() -> Callable[[list], int | None]:
    """``generation(dicts)``: another number once one of them, or the dict behind a view, has changed; or None."""
    module = native()
    return module.generation if module else lambda dicts: None


def fast(python: Callable[..., bool]) -> Callable[..., bool]:
    """The C++ function that says the same as a ``python_...`` of this file, where it was built."""
    module = native()
    return getattr(module, python.__name__.removeprefix("python_")) if module else python


class Check(Protocol):
    def __call__(self, tensors: Sequence[Any], /) -> bool: ...

    def look(self, tensors: Sequence[Any], /) -> Sequence[Any] | None:
        """The tensors, or None where the check fails. Many of them come as a list that also keeps where each lies."""
        ...


def tensor_check(forms: Sequence[TensorForm], firsts: Sequence[int] = ()) -> Check:
    """``check(tensors)``: a list or tuple of plain strided tensors of these forms.

    Where `firsts` are given they say which are one object: tensor i is tensor firsts[i], and no other before it.
    """
    module = native()
    if module is None:
        return PythonTensorCheck(forms, firsts)
    like = {(f.dtype, f.device): torch.empty(0, dtype=f.dtype, device=f.device) for f in forms}
    symbols = {d: -1 - i for i, d in enumerate(dict.fromkeys(d for f in forms for d in f.dims if isinstance(d, str)))}
    dims = [[d if isinstance(d, int) else symbols[d] for d in form.dims] for form in forms]
    return module.TensorCheck([like[f.dtype, f.device] for f in forms], dims, len(symbols), list(firsts))


def python_apart(tensors: list, groups: list[int]) -> bool:
    """Whether no tensor overlaps memory of another group; groups below 0 are none."""
    memory, owners = Memory(), dict[int, int]()
    for tensor, group in sorted(zip(tensors, groups, strict=True), key=lambda pair: -pair[1]):
        for piece in memory.of(tensor):
            if owners.setdefault(piece, max(group, -1)) != max(group, -1):
                return False
    return True


def python_lengths(values: list, expected: list[int | type]) -> bool:
    """Whether every container still has as many entries as expected, and every object the type expected of it."""
    return all(
        type(value) is wanted if isinstance(wanted, type) else len(value) == wanted
        for value, wanted in zip(values, expected, strict=True)
    )


def python_read(wheres: list, keys: list) -> list | None:
    try:
        return list(map(item, wheres, keys))
    except LookupError:
        return None


def python_unchanged(wheres: list, keys: list, values: list) -> bool:
    """Whether every ``item(where, key)`` still is that very value."""
    now = python_read(wheres, keys)
    return now is not None and all(map(is_, now, values))


class PythonTensorCheck:
    """The same as tensor_check.h's TensorCheck."""

    def __init__(self, forms: Sequence[TensorForm], firsts: Sequence[int] = ()) -> None:
        self._firsts = list(firsts)
        self._dtypes = [form.dtype for form in forms]
        self._devices = [form.device for form in forms]
        self._layouts = [torch.strided] * len(forms)
        self._shapes = _shape_check([form.dims for form in forms])

    def __call__(self, tensors: Sequence[Any]) -> bool:
        return (
            PLAIN.issuperset(map(type, tensors))
            and list(map(_DTYPE, tensors)) == self._dtypes
            and self._shapes(list(map(_SHAPE, tensors)))
            and list(map(_DEVICE, tensors)) == self._devices
            and list(map(_LAYOUT, tensors)) == self._layouts
            and (not self._firsts or firsts_of(tensors) == self._firsts)
        )

    def look(self, tensors: Sequence[Any]) -> Sequence[Any] | None:
        return tensors if self(tensors) else None


def _shape_check(dims: Sequence[tuple[int | str, ...]]) -> Callable[[list], bool]:
    """A function that compares all shapes with one list, in which each symbol is read from its first tensor."""
    if all(isinstance(d, int) for shape in dims for d in shape):
        expected = [torch.Size(shape) for shape in dims]  # type: ignore[arg-type]
        return expected.__eq__
    symbols: dict[str, str] = {}
    for i, shape in enumerate(dims):
        for j, dim in enumerate(shape):
            if isinstance(dim, str) and dim not in symbols:
                symbols[dim] = f"s[{i}][{j}]"
    local = {symbol: f"d{i}" for i, symbol in enumerate(symbols)}
    distinct = {shape: f"t{i}" for i, shape in enumerate(dict.fromkeys(dims))}
    lines = ["def check(s):", " try:"]
    lines += [f"  {local[symbol]} = {where}" for symbol, where in symbols.items()]
    lines += [" except IndexError: return False"]
    for shape, name in distinct.items():
        lines.append(f" {name} = ({''.join(f'{d if isinstance(d, int) else local[d]}, ' for d in shape)})")
    lines.append(f" return s == [{', '.join(distinct[shape] for shape in dims)}]")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)  # only integers and the names made above
    return scope["check"]
