"""What Python code can reach besides its arguments: the functions that a forward may call, the names they use, and the
objects behind attributes, globals and closures. Bounded: what lies deeper than anybody looks is not found.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fxopt.names import is_users, named_by, names_asked, names_in, user_classes
from fxopt.torch_internals.dynamo import as_written

MOST_FUNCTIONS, _MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 2000, 200_000, 1000, 12
HINTS = (types.GenericAlias, types.UnionType)  # list[int], whose attributes are those of list
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, *HINTS)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, tuple, set, frozenset, deque)


def held_by(*roots: Any, without: Iterable[Any] = (), seen: set[int] | None = None) -> Iterator[Any]:
    """`roots` and all that is behind their attributes, items and closures, and behind the globals they name; once.

    What stands in `without`, or by its id in `seen`, is not looked into, nor are hooks.
    """
    seen, level = set() if seen is None else seen, list(roots)
    seen.update(map(id, without))
    for _ in range(_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if id(value) not in seen and len(seen) < _MOST_OBJECTS:
                seen.add(id(value))
                yield value
                inner += [child for child in _children(value) if type(child) not in _PLAIN and not _is_empty(child)]
        level = inner


OWN = ("_modules", "_parameters", "_buffers")  # the dicts of what a module is made of
_HOOKS = frozenset(vars(nn.Module())).difference(OWN)


_MOST_ENTRIES = 30_000  # to compare at each call: of a list 5 ns each; of a dict 20, unless Python numbers its changes
MOST_BYTES = 1 << 20  # of an array, 37 us
MEMORY = (np.ndarray, array.array, bytearray, memoryview)


def is_long(value: Any) -> bool:
    """Whether a container has so many entries that only their number is looked at."""
    return isinstance(value, (list, set, deque, dict, types.MappingProxyType)) and len(value) > _MOST_ENTRIES


def too_large(value: Any) -> str:
    """How much an array holds, where that is too much to see whether it changes; "" otherwise."""
    if is_of_objects(value):
        return f"holds {value.size:,} objects" if value.size > _MOST_ENTRIES else ""
    if isinstance(value, MEMORY) and not is_read_only(value):
        return f"holds {size:,} bytes" if (size := bytes_of(value)) > MOST_BYTES else ""
    return ""


def bytes_of(memory: Any) -> int:
    """The size of an array's memory."""
    return memory.nbytes if isinstance(memory, (np.ndarray, memoryview)) else memoryview(memory).nbytes


def is_read_only(memory: Any) -> bool:
    """Whether it is an array of numbers whose owner says that nobody writes it, nor the one that it is a view of."""
    if is_of_objects(memory):
        return False
    while isinstance(memory, np.ndarray) and not memory.flags.writeable:
        memory = memory.base
    return memory is None or isinstance(memory, bytes)


def is_of_objects(value: Any) -> bool:
    """Whether it is an array of Python objects."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"


_BUILT_IN = (OrderedDict, dict, types.MappingProxyType, list, tuple, deque, set, frozenset)


def built_in(container: Any) -> Any:
    """The class of Python's that holds the entries of a container, to be read and written by that one's methods: those
    of a subclass may do anything. The dict of transformers' activations makes a new module at each read."""
    return next(kind for kind in _BUILT_IN if isinstance(container, kind))


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, tuple, set) and not value


def _children(value: Any) -> Iterable[Any]:
    if type(value) in weakref.ProxyTypes:
        return (behind_proxy(value),)
    if isinstance(value, _ATOMS) or is_ours(value):
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


@dataclass
class Code:
    """The user's functions that forwards may call, the classes they belong to, all names in them, and all values that
    were found on the way to them.

    Attributes:
        computed: whether a function may ask for attributes by names that no function spells.
        modules: those that are values themselves, as in self.backend = numpy_like.
    """

    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    computed: bool = False
    held: list[Any] = field(default_factory=list)
    modules: dict[int, types.ModuleType] = field(default_factory=dict)
    _constructed: set[type] = field(default_factory=set)
    _pending: list[types.FunctionType] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def behind(cls, roots: Iterable[Any], without: Iterable[nn.Module] = ()) -> Code:
        """That of `roots`, modules and functions, and of what they hold; but for what stands in `without`."""
        code = cls()
        code._search(roots, without)
        return code

    def _search(self, roots: Iterable[Any], without: Iterable[nn.Module]) -> None:
        self._seen.update(map(id, without))
        self._look_at(roots)
        while self._pending and not self.too_many:
            self._follow(self._pending.pop())

    @property
    def too_many(self) -> bool:
        """Whether more functions are in reach than anybody follows: what they read is not all known."""
        return len(self.functions) > MOST_FUNCTIONS

    def _look_at(self, roots: Iterable[Any]) -> None:
        """The functions and the classes behind these values."""
        for value in held_by(*roots, seen=self._seen):
            if type(value) in weakref.ProxyTypes:  # the value itself follows
                continue
            self.held.append(value)
            if isinstance(value, types.FunctionType):
                self._pending.append(value)
            if isinstance(value, types.ModuleType) and is_users(value.__name__):
                self.modules[id(value)] = value
                self._look_at(vars(value)[name] for name in self.names & vars(value).keys())
            for base in user_classes(value if isinstance(value, type) else type(value)):
                self._enter(base, made=isinstance(value, type))

    def _enter(self, kind: type, made: bool) -> None:
        """What Python calls by itself of a class, and what the code that is known so far names. Modules and settings
        are there already: what their __init__ reads counts only where their class is `made`, named by a function."""
        made = made or not (issubclass(kind, nn.Module) or dataclasses.is_dataclass(kind))
        if kind not in self.classes:
            self.classes[kind] = None
            self._look_at([type(kind), *(vars(kind)[name] for name in vars(kind) if self._is_called(name))])
        if made and kind not in self._constructed:
            self._constructed.add(kind)
            self._look_at(vars(kind)[name] for name in MAKING & vars(kind).keys())

    def called_of(self, kind: type) -> Iterator[str]:
        """The methods of a class that Python calls by itself, or that the code names."""
        own = vars(kind)
        names = (name for name in own if self._is_called(name) or (name in MAKING and kind in self._constructed))
        return (name for name in names if hasattr(type(own[name]), "__get__"))

    def _is_called(self, name: str) -> bool:
        implicit = name == "forward" or (name.startswith("__") and name.endswith("__") and name not in _APART)
        return implicit or (name in self.names and name not in MAKING)

    def _follow(self, function: types.FunctionType) -> None:
        wraps = as_written(function) is not function
        if wraps or id(function) in self.functions or not is_users(function.__module__):
            return
        self.functions[id(function)] = function
        asked, computed = names_asked(function.__code__)
        given = {value for name in asked if isinstance(value := function.__globals__.get(name), str)}
        self.computed |= computed or len(given) < len(asked)
        new = (names_in(function.__code__)[1] | given) - self.names
        self.names |= new
        spaces = map(vars, (*self.classes, *self.modules.values()))
        named = [space[name] for space in spaces for name in new & space.keys() if name not in MAKING]
        self._look_at(named)


MAKING = frozenset({"__init__", "__post_init__"})  # what Python calls to make an object
_APART = MAKING | {f"__{name}__" for name in ("repr", "del", "copy", "deepcopy", "reduce", "reduce_ex")}
_APART |= {"__init_subclass__", "__getstate__", "__setstate__", "__doc__", "__module__", "__dict__", "__weakref__"}


MISSING = object()


def item(where: Any, key: Any) -> Any:
    """What stands at ``where[key]``, whatever a subclass of dict or list gives for it; of a function its attribute, and
    of a cell what it holds, None where nothing is assigned yet."""
    if isinstance(where, dict):
        if (value := dict.get(where, key, MISSING)) is MISSING:
            raise KeyError(key)
        return value
    if isinstance(where, list):
        return list.__getitem__(where, key)
    if isinstance(where, types.FunctionType):
        return getattr(where, key)
    if isinstance(where, types.CellType):
        try:
            return where.cell_contents
        except ValueError:
            return None
    return where[key]


class Absent:
    """What may get a name that it has not, read as absent[name]."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> Any:
        return self._where.get(name, MISSING)


class Fields:
    """The slots of an object, read as fields[name]."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None


class Variable:
    """A context variable, read as variable[name]."""

    def __init__(self, variable: ContextVar) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        return self._variable.get(None)
