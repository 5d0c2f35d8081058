"""What Python code can reach besides its arguments: the functions that a forward may call, the names they use, and the
objects behind attributes, globals and closures. Bounded: what lies deeper than anybody looks is not found.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_MOST_FUNCTIONS, _MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 500, 200_000, 1000, 6
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, torch.Tensor)
_CONTAINERS = (list, tuple, set, frozenset, deque)


def held_by(*roots: Any) -> Iterator[Any]:
    """`roots` and all that is behind their attributes, items and closures, and behind the globals they name; once."""
    seen, level = set[int](), list(roots)
    for _ in range(_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if id(value) not in seen and len(seen) < _MOST_OBJECTS:
                seen.add(id(value))
                yield value
                inner += _children(value)
        level = inner


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, _ATOMS):
        return ()
    if isinstance(value, dict):
        return itertools.islice(value.values(), _MOST_ITEMS)
    if isinstance(value, _CONTAINERS):
        return itertools.islice(value, _MOST_ITEMS)
    if isinstance(value, types.FunctionType):
        named = (where[name] for _, where, name in named_by(value)) if is_users(value.__module__) else ()
        return [*map(_content, value.__closure__ or ()), *(value.__defaults__ or ()), *named]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, weakref.ReferenceType):
        return (value(),)
    own = [getattr(value, name, None) for name in slots_of(type(value))]
    methods = (f for kind in _user_classes(type(value)) for f in functions_in(vars(kind).values()))
    return [*getattr(value, "__dict__", {}).values(), *own, *(methods if isinstance(value, nn.Module) else ())]


def slots_of(kind: type) -> Iterator[str]:
    """Attributes of instances outside of their __dict__."""
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function, with those of the functions within it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    words = (constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier())
    return frozenset(code.co_names).union(words, *inner)


def functions_in(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The functions behind methods, properties and partial calls."""
    for value in values:
        inner = getattr(value, "__func__", None) or getattr(value, "func", None) or value
        for function in (value.fget,) if isinstance(value, property) else (inner,):
            if isinstance(function, types.FunctionType):
                yield function


@dataclass
class Code:
    """The user's functions that the forwards of some modules may call, the classes they belong to, and all names."""

    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    @classmethod
    def behind(cls, modules: Iterable[nn.Module]) -> Code:
        code = cls()
        for module in modules:
            code._add_class(type(module))
            code._follow(functions_in(vars(module).values()))
        code._follow(f for kind in list(code.classes) for f in functions_in([vars(kind).get("forward")]))
        return code

    def _add_class(self, kind: type) -> None:
        for base in _user_classes(kind):
            if base not in self.classes:
                self.classes[base] = None
                named = self.names | {"__init__", "__call__", "__getattr__"} if self.functions else set[str]()
                self._follow(functions_in(value for name, value in vars(base).items() if name in named))

    def _follow(self, functions: Iterable[types.FunctionType]) -> None:
        pending = list(functions)
        while pending and len(self.functions) < _MOST_FUNCTIONS:
            function = pending.pop()
            if id(function) in self.functions or not is_users(function.__module__):
                continue
            self.functions[id(function)] = function
            named = names_in(function.__code__)
            new, self.names = named - self.names, self.names | named
            pending += functions_in(vars(kind)[name] for kind in self.classes for name in new & vars(kind).keys())
            pending += functions_in(map(_content, function.__closure__ or ()))
            for _, where, name in named_by(function):
                if isinstance(where[name], type):
                    self._add_class(where[name])
                else:
                    pending += functions_in([where[name]])


def named_by(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict, key) of the globals that a function names, in its own module and in others of its package."""
    named = names_in(function.__code__)
    for name in named & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield function.__module__ or "", function.__globals__, name
        elif is_users(value.__name__):
            yield from ((value.__name__, vars(value), inner) for inner in named & vars(value).keys())


class Cell:
    """A variable of an enclosing function, read as cell[name]."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        return _content(self._cell)

    def get(self, name: str, default: Any = None) -> Any:
        return _content(self._cell)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _user_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if is_users(base.__module__)]


_LIBRARIES = frozenset({"torch", "fxopt", "numpy", "scipy", "pandas", "sklearn", "pytest", "_pytest", "builtins"})


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether the module of this name is the user's, or of a library of models, and not one that models are built on."""
    top = (module or "").partition(".")[0]
    return top == "__main__" or (top not in sys.stdlib_module_names and top not in _LIBRARIES)
