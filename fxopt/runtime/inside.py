"""What objects, containers and arrays behind watched values hold: slots of their own."""

from __future__ import annotations

import argparse
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fxopt.names import is_users
from fxopt.reach.code import Code
from fxopt.reach.containers import MEMORY, MOST_BYTES, built_in, bytes_of, is_long, is_of_objects, too_large
from fxopt.reach.entries import Fields, Variable, item
from fxopt.reach.held import HINTS, behind_proxy, is_of_logging, is_ours, slots_of
from fxopt.torch_internals.operators import OPERATORS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (*_PLAIN, *HINTS, *OPERATORS, type, torch.Tensor, nn.Module, ModuleType, FunctionType, BuiltinFunctionType)
_MAPPINGS = (dict, MappingProxyType)
_CONTAINERS = (list, set, deque, *_MAPPINGS)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_HOLDERS = ("collections", "weakref")  # of these modules all attributes count: no code of a forward names them
_LONGEST = 500  # characters of a path: those of 10,000 objects in a chain took 795 MB
_MOST_OF_ALL = 4 * MOST_BYTES


@dataclass
class Slot:
    """One watched value: `item(where, key)`, an attribute, a submodule, a global, an item, or a member of `of`: a
    class, or an object without a dict."""

    path: str
    where: Any
    key: Any
    kind: str = "attribute"
    of: Any = None

    def read(self) -> Any:
        return item(self.where, self.key)

    @property
    def identity(self) -> tuple[int, Any]:
        return id(self.where if self.of is None else self.of), self.key  # vars(class) is another object each time

    def __str__(self) -> str:
        return f"{self.path}.{self.key}".lstrip(".")


class Inside:
    """What is behind values.

    Args:
        values: (path, value) of each.
        code: only the attributes that it names are looked at, unless it may compute their names.
        apart: classes whose objects are not looked into.

    Attributes:
        slots: attributes and items.
        ordered: dicts and sets, whose keys stay what they are and in their order.
        sized: lists, containers of many entries and the dicts of objects, whose lengths stay.
        arrays: memory whose bytes stay.
        objects: objects, whose classes stay.
        too_large: arrays that are not watched although they may change, and how much they hold.
    """

    def __init__(self, values: Iterable[tuple[str, Any]], code: Code, apart: tuple[type, ...] = ()) -> None:
        self.slots: list[Slot] = []
        self.ordered: list[Any] = []
        self.sized: list[Any] = []
        self.arrays: list[Any] = []
        self.objects: list[Any] = []
        self.too_large: list[str] = []
        self._opaque: tuple[Any, ...] = (*_OPAQUE, *apart)
        self._left = _MOST_OF_ALL
        self._names = code.names
        self._computed = code.computed
        self._seen = set[int]()
        level = list(values)
        while level:
            level = [child for path, value in level for child in self._enter(path, value)]

    def _enter(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        if type(value) in weakref.ProxyTypes:
            return [(path, behind_proxy(value))]
        if isinstance(value, weakref.ReferenceType):
            return [(path, value())]
        if isinstance(value, self._opaque) or is_ours(value) or id(value) in self._seen:
            return ()
        self._seen.add(id(value))
        if large := too_large(value):
            self.too_large.append(f"{path} {large}")
            return ()
        if isinstance(value, MEMORY):
            return self._memory(path, value)
        if isinstance(value, (tuple, frozenset)):
            return [(path, inner) for inner in value]
        if isinstance(value, _CONTAINERS):
            return self._container(path, value)
        if isinstance(value, MethodType):
            return [(path, value.__self__)]
        if isinstance(value, functools.partial):
            return [(path, value.func), (path, value.args), (path, value.keywords)]
        slots = self._add(self._fields(path, value))
        return [(str(slot) if len(path) < _LONGEST else path, slot.read()) for slot in slots]

    def _add(self, slots: Iterable[Slot]) -> list[Slot]:
        found = list(slots)
        self.slots += found
        return found

    def _memory(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if is_of_objects(value):
            return self._items_at(path, value, list(np.ndindex(value.shape)), value.flat)
        if (size := bytes_of(value)) > MOST_BYTES:  # and read-only
            return []
        self._left -= size
        if self._left < 0:
            self.too_large.append(f"{path}, with other arrays, holds {_MOST_OF_ALL - self._left:,} bytes")
        else:
            self.arrays.append(value)
        return []

    def _container(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if is_long(value):
            self.sized.append(value)
            return []
        (self.sized if isinstance(value, (list, deque)) else self.ordered).append(value)
        base = built_in(value)
        entries = list(base.__iter__(value))
        if isinstance(value, _MAPPINGS):
            return [*((path, key) for key in entries), *self._items_at(path, value, entries, base.values(value))]
        return self._items_at(path, value, () if isinstance(value, set) else range(len(entries)), entries)

    def _items_at(self, path: str, value: Any, keys: Sequence[Any], items: Iterable[Any]) -> list[tuple[str, Any]]:
        self._add(Slot(path, value, key, "item") for key in keys)
        return [(path, inner) for inner in items]

    def _fields(self, path: str, value: Any) -> Iterator[Slot]:
        if isinstance(value, ContextVar):
            yield Slot(path, Variable(value), "value", of=value)
            return
        if isinstance(value, CellType):
            yield Slot(path, value, "cell_contents", of=value)
            return
        if value is os.environ:
            yield Slot("os.environ", vars(os.environ), "_data")
            return
        fields, kind = getattr(value, "__dict__", {}), type(value)
        every = self._computed or hasattr(kind, "__getattr__") or kind.__module__ in _HOLDERS
        names = list(fields) if every else list(self._names & fields.keys())
        if is_of_logging(value):  # its own level, but not its filters and caches, nor other loggers
            names = [name for name in names if isinstance(fields[name], _PLAIN)]
        if isinstance(value, threading.local):  # another dict in each thread
            yield from (Slot(path, Fields(value), name, of=value) for name in names)
            return
        yield from (Slot(path, fields, name) for name in names)
        for name in slots_of(kind):
            if (self._computed or name in self._names) and hasattr(value, name):
                yield Slot(path, Fields(value), name, of=value)
        if is_users(kind.__module__) or kind in _NAMESPACES:
            self.objects.append(value)
            if hasattr(value, "__dict__"):
                self.sized.append(fields)
