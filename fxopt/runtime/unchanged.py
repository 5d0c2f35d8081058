"""Whether watched values, lengths, types and orders still are what they were; most often a look at versions says so."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fxopt.runtime.checks import comparer, length_check, python_read, version_reader
from fxopt.runtime.flatten import same_value

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, range, slice)


class Unchanged:
    """What is expected of containers and objects.

    While no dict has changed in any way, what is in dicts needs no look: Python numbers their changes (PEP 509).

    Args:
        values: (container, key, value).
        shapes: (container, length) and (object, type).
        orders: (container, its items or keys in order).
    """

    def __init__(
        self,
        values: Sequence[tuple[Any, Any, Any]],
        shapes: Sequence[tuple[Any, int | type]],
        orders: Sequence[tuple[Any, list]],
    ) -> None:
        expected = values, shapes, orders
        self._in_dicts = _Part(*([each for each in part if _has_version(each)] for part in expected))  # type: ignore[misc]
        self._elsewhere = _Part(*([each for each in part if not _has_version(each)] for part in expected))  # type: ignore[misc]
        dicts = {id(each[0]): each[0] for part in expected for each in part if _has_version(each)}
        self._dicts, self._versions = list(dicts.values()), version_reader()
        self._seen: bytes | None = None

    def holds(self) -> bool:
        versions = self._versions(self._dicts)
        if versions is None or versions != self._seen:
            if not self._in_dicts.holds():
                return False
            self._seen = versions
        return self._elsewhere.holds()


class _Part:
    def __init__(self, values: list, shapes: list, orders: list) -> None:
        self._wheres, self._keys, self._values = _columns(values, 3)
        self._shaped, self._shapes = _columns(shapes, 2)
        self._ordered, self._orders = _columns(orders, 2)
        self._unchanged, self._lengths = comparer(), length_check()

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


def _has_version(expected: Sequence[Any]) -> bool:
    return type(expected[0]) in (dict, MappingProxyType) and not isinstance(expected[-1], type)


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    return list(map(list, zip(*rows, strict=True))) or [[] for _ in range(count)]


def _as_good(a: Any, b: Any) -> bool:
    """Whether a new value is as good as the old one: the same object, or equal, and nothing can change inside."""
    if isinstance(a, tuple) and type(a) is type(b) and len(a) == len(b):
        return all(map(_as_good, a, b))
    return a is b or (isinstance(a, _IMMUTABLE) and same_value(a, b))
