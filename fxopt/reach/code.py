"""The functions that a forward may call, and the names they use."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxopt.names import attributes_named, is_users, names_asked, user_classes
from fxopt.reach.held import MOST_OBJECTS, held_by
from fxopt.torch_internals.dynamo import as_written

_MOST_FUNCTIONS = 2000


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
    def too_many(self) -> str:
        """What is in reach, where it is more than anybody follows, so that what a forward reads is not all known."""
        if len(self.functions) > _MOST_FUNCTIONS:
            return f"call any of more than {_MOST_FUNCTIONS:,} functions"
        return f"read any of more than {MOST_OBJECTS:,} objects" if len(self._seen) >= MOST_OBJECTS else ""

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
        new = (attributes_named(function) | given) - self.names
        self.names |= new
        spaces = map(vars, (*self.classes, *self.modules.values()))
        named = [space[name] for space in spaces for name in new & space.keys() if name not in MAKING]
        self._look_at(named)


MAKING = frozenset({"__init__", "__post_init__"})  # what Python calls to make an object
_APART = MAKING | {f"__{name}__" for name in ("repr", "del", "copy", "deepcopy", "reduce", "reduce_ex")}
_APART |= {"__init_subclass__", "__getstate__", "__setstate__", "__doc__", "__module__", "__dict__", "__weakref__"}
