"""The objects behind attributes, items, globals and closures."""

from __future__ import annotations

import functools
import itertools
import logging
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fxopt.names import is_users, named_by
from fxopt.reach.containers import built_in
from fxopt.reach.entries import item
from fxopt.torch_internals.dynamo import as_written

MOST_OBJECTS, _MOST_ITEMS = 200_000, 1000
HINTS = (types.GenericAlias, types.UnionType)  # list[int], whose attributes are those of list
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, *HINTS)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, tuple, set, frozenset, deque)
OWN = ("_modules", "_parameters", "_buffers")  # the dicts of what a module is made of
_HOOKS = frozenset(vars(nn.Module())).difference(OWN)
_OF_LOGGING = (logging.Filterer, logging.LoggerAdapter, logging.Manager, logging.PlaceHolder)


def held_by(*roots: Any, without: Iterable[Any] = (), seen: set[int] | None = None) -> Iterator[Any]:
    """`roots` and all that is behind their attributes, items and closures, and behind the globals they name; once.

    What stands in `without`, or by its id in `seen`, is not looked into, nor are hooks. Behind MOST_OBJECTS in `seen`
    nothing more is given.
    """
    seen, level = set() if seen is None else seen, list(roots)
    seen.update(map(id, without))
    while level:
        inner: list[Any] = []
        for value in level:
            if id(value) not in seen and len(seen) < MOST_OBJECTS:
                seen.add(id(value))
                yield value
                inner += [child for child in _children(value) if type(child) not in _PLAIN and not _is_empty(child)]
        level = inner


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, tuple, set) and not value


def _children(value: Any) -> Iterable[Any]:
    if type(value) in weakref.ProxyTypes:
        return (behind_proxy(value),)
    if isinstance(value, _ATOMS) or is_ours(value) or is_of_logging(value):
        return ()
    if isinstance(value, torch.Tensor):
        return vars(value).values()
    if isinstance(value, (dict, types.MappingProxyType)):
        base = built_in(value)
        parts = base.values(value), base.__iter__(value)
        return itertools.chain(*(itertools.islice(part, _MOST_ITEMS) for part in parts))
    if isinstance(value, _CONTAINERS):
        return itertools.islice(built_in(value).__iter__(value), _MOST_ITEMS)
    if isinstance(value, types.FunctionType):
        if (written := as_written(value)) is not value:
            return (written,)
        named = (where[name] for _, where, name in named_by(value)) if is_users(value.__module__) else ()
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        # super() keeps the class of its method in a cell, and makes nothing of it.
        return [*(item(cell, "") for name, cell in cells if name != "__class__"), *given, *named]
    if isinstance(value, weakref.ReferenceType):
        return (value(),)
    if isinstance(value, ContextVar):
        return (value.get(None),)
    if isinstance(value, types.CellType):
        return (item(value, ""),)
    kind: Any = type(value)
    own = [*(getattr(value, name, None) for name in slots_of(kind)), *wrapped(value)]
    fields = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        return [item for name, item in fields.items() if name not in _HOOKS]
    return [*fields.values(), *own]


_WRAPPERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.partial: ("func", "args", "keywords"),
    types.BuiltinFunctionType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
}


def wrapped(value: Any) -> list[Any]:
    """What a method, a property or a partial call is around."""
    return [getattr(value, name, None) for name in _WRAPPERS.get(type(value), ())]


def is_ours(value: Any) -> bool:
    """Whether it is what makes a model an optimized one, or a graph of one: no code of a forward reads it."""
    return type(value).__module__.startswith(("fxopt.", "torch.fx.")) and not isinstance(value, nn.Module)


def is_of_logging(value: Any) -> bool:
    """Whether it is a logger, a handler, or what leads to all loggers of the process. What they hold changes as code
    asks whether to log, and a forward computes nothing from it."""
    return isinstance(value, _OF_LOGGING)


def behind_proxy(proxy: Any) -> Any:
    """What a weakref.proxy stands for."""
    return proxy.__repr__.__self__


def _slots_of(kind: type) -> tuple[str, ...]:
    """Attributes that live outside of an instance's __dict__, and so are not shared by sharing it."""
    declared = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = (name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


slots_of: Callable[[type], tuple[str, ...]] = functools.lru_cache(maxsize=4096)(_slots_of)


def functions_in(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The functions behind methods, properties and partial calls."""
    for value in values:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (types.MethodType, classmethod, staticmethod)):
            value = value.__func__
        elif isinstance(value, (functools.partial, functools.cached_property)):
            value = value.func
        if isinstance(value, types.FunctionType):
            yield value
