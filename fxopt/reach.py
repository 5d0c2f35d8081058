"""What Python code can reach besides its arguments: the functions that a forward may call, the names they use, and the
objects behind attributes, globals and closures. Bounded: what lies deeper than anybody looks is not found.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_MOST_FUNCTIONS, _MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 500, 200_000, 1000, 6
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, torch.Tensor)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, tuple, set, frozenset, deque)


def held_by(*roots: Any, without: Iterable[Any] = ()) -> Iterator[Any]:
    """`roots` and all that is behind their attributes, items and closures, and behind the globals they name; once.

    What stands in `without` is not looked into, nor are hooks.
    """
    seen, level = set(map(id, without)), list(roots)
    for _ in range(_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if id(value) not in seen and len(seen) < _MOST_OBJECTS:
                seen.add(id(value))
                yield value
                inner += [child for child in _children(value) if type(child) not in _PLAIN and not _is_empty(child)]
        level = inner


_HOOKS = frozenset(vars(nn.Module())) - {"_modules", "_parameters", "_buffers"}


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, tuple, set) and not value


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
    own = [getattr(value, name, None) for name in slots_of(type(value))]  # type: ignore[arg-type]
    fields = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        return [item for name, item in fields.items() if name not in _HOOKS]
    return [*fields.values(), *own]


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """Attributes of instances outside of their __dict__."""
    declared = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = (name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if not name.startswith("__"))


@functools.cache
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that a function reads, and all its names, those of attributes too; with the functions within it."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    read = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    words = (constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier())
    return frozenset(read).union(*(names for names, _ in inner)), frozenset(code.co_names).union(
        words, *(names for _, names in inner)
    )


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


@dataclass
class Code:
    """The user's functions that forwards may call, the classes they belong to, and all names in them."""

    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    _constructed: dict[type, None] = field(default_factory=dict)

    @classmethod
    def behind(cls, roots: Iterable[Any], without: Iterable[nn.Module] = ()) -> Code:
        """That of `roots`, modules and functions, and of what they hold; but for what stands in `without`."""
        code = cls()
        held = [
            value
            for value in held_by(*roots, without=without)
            if isinstance(value, types.FunctionType) or is_users(type(value).__module__)
        ]
        code.classes.update((base, None) for value in held for base in _user_classes(type(value)))  # type: ignore[arg-type]
        code._follow(f for kind in list(code.classes) for f in functions_in([vars(kind).get("forward")]))
        code._follow(functions_in(held))
        return code

    def _follow(self, functions: Iterable[types.FunctionType]) -> None:
        pending = list(functions)
        while pending and len(self.functions) < _MOST_FUNCTIONS:
            function = pending.pop()
            if id(function) in self.functions or not is_users(function.__module__):
                continue
            self.functions[id(function)] = function
            new = names_in(function.__code__)[1] - self.names
            self.names |= new
            pending += self._methods(self.classes, new)
            pending += functions_in(map(_content, function.__closure__ or ()))
            named = [where[name] for _, where, name in named_by(function)]
            pending += functions_in(named)
            for base in (base for value in named if isinstance(value, type) for base in _user_classes(value)):
                if base not in self._constructed:
                    self.classes[base] = self._constructed[base] = None
                    pending += self._methods([base], self.names)

    def _methods(self, classes: Iterable[type], names: set[str] | frozenset[str]) -> list[types.FunctionType]:
        """What is called by its name, and what Python calls by itself. Modules and settings are there already: what
        their __init__ reads counts only where a function names their class."""
        asked = names | {"__init__", "__call__", "__getattr__", "__getitem__", "__len__", "__bool__", "__iter__"}
        found = ((kind, name) for kind in classes for name in asked & vars(kind).keys())
        return list(functions_in(vars(kind)[name] for kind, name in found if name != "__init__" or self._is_made(kind)))

    def _is_made(self, kind: type) -> bool:
        return kind in self._constructed or not (issubclass(kind, nn.Module) or dataclasses.is_dataclass(kind))


def named_by(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict, key) of the globals that a function reads, in its own module and in others of the user's."""
    read, named = names_in(function.__code__)
    for name in read & function.__globals__.keys():
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


class Fields:
    """The slots of an object, read as fields[name]."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._owner, name, default)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@functools.lru_cache(maxsize=4096)
def _user_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if is_users(base.__module__)]


_LIBRARIES = frozenset({"torch", "fxopt", "numpy", "scipy", "pandas", "sklearn", "pytest", "_pytest", "builtins"})


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether the module of this name is the user's, or of a library of models; not what models are built on."""
    top = (module or "").partition(".")[0]
    return top == "__main__" or (top not in sys.stdlib_module_names and top not in _LIBRARIES)
