"""Whether watched values, lengths, types and orders still are what they were; most often a look at versions says so."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fxopt.runtime.checks import fast, generation_reader, python_lengths, python_read, python_unchanged
from fxopt.runtime.flatten import same_value

_IN_ORDER = (dict, MappingProxyType)
_KINDS = (*_IN_ORDER, OrderedDict)  # whose move_to_end has no number
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, range, slice)


class Unchanged:
    """What is expected of containers and objects.

    While no dict has changed in any way, what is in dicts needs no look: Python numbers their changes (PEP 509).

    Args:
        values: (container, key, value).
        shapes: (container, length) and (object, type).
        orders: (container, its items or keys in order).
        assigned: dicts that calls themselves change: their versions say nothing.
    """

    def __init__(
        self,
        values: Sequence[tuple[Any, Any, Any]],
        shapes: Sequence[tuple[Any, int | type]],
        orders: Sequence[tuple[Any, list]],
        assigned: Iterable[dict] = (),
    ) -> None:
        apart = set(map(id, assigned))
        parts = [
            _divided(part, kinds, apart) for part, kinds in ((values, _KINDS), (shapes, _KINDS), (orders, _IN_ORDER))
        ]
        self._in_dicts, elsewhere = (_Part(*part) for part in zip(*parts, strict=True))
        dicts = {id(each[0]): each[0] for numbered, _ in parts for each in numbered}
        self._dicts, self._generation = list(dicts.values()), generation_reader()
        self._seen: int | None = None
        self._rest_holds = elsewhere.holds  # each look at an attribute is 15 ns of a call

    def holds(self) -> bool:
        generation = self._generation(self._dicts)
        if generation is None or generation != self._seen:
            if not self._in_dicts.holds():
                return False
            self._seen = generation
        return self._rest_holds()


class _Part:
    def __init__(self, values: list, shapes: list, orders: list) -> None:
        self._wheres, self._keys, self._values = _columns(values, 3)
        self._shaped, self._shapes = _columns(shapes, 2)
        self._ordered, self._orders = _columns(orders, 2)
        self._unchanged, self._lengths = fast(python_unchanged), fast(python_lengths)

    def holds(self) -> bool:
        return (
            (self._unchanged(self._wheres, self._keys, self._values) or self._equal())
            and self._lengths(self._shaped, self._shapes)
            and (not self._ordered or self._same_orders())
        )

    def _equal(self) -> bool:
        """Equal but new values (`model.temperature = 0.5` at each step); they are the ones to expect from now on."""
        values = python_read(self._wheres, self._keys)
        if values is None or not all(map(_as_good, values, self._values)):
            return False
        self._values = values
        return True

    def _same_orders(self) -> bool:
        try:
            return list(map(list, self._ordered)) == self._orders
        except Exception:  # an __eq__ that cannot answer
            return False


def _divided(expected: Sequence[Any], kinds: tuple[type, ...], apart: set[int]) -> tuple[list, list]:
    """What containers of these kinds have a version for, and the rest, types of objects among it."""
    numbered = [
        type(each[0]) in kinds and id(each[0]) not in apart and not isinstance(each[-1], type) for each in expected
    ]
    return [e for e, has in zip(expected, numbered, strict=True) if has], [
        e for e, has in zip(expected, numbered, strict=True) if not has
    ]


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    return list(map(list, zip(*rows, strict=True))) or [[] for _ in range(count)]


def _as_good(a: Any, b: Any) -> bool:
    """Whether a new value is as good as the old one: the same object, or equal, and nothing can change inside."""
    if isinstance(a, tuple) and type(a) is type(b) and len(a) == len(b):
        return all(map(_as_good, a, b))
    return a is b or (isinstance(a, _IMMUTABLE) and same_value(a, b))
