"""What a model's code reaches by name outside of the model: globals of its modules, attributes of its classes, and what
its functions enclose, have as defaults, as attributes and in their caches.

A forward that counts in one of them would do so once, in the trace. So these are compared after every look, put back,
and what changed is the reason why the model stays eager. Only what a cache of functools took in is just dropped.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from fxopt.capture.mirror import BYTES, attributes, is_plain_object, is_unseen
from fxopt.capture.questions import first_question
from fxopt.capture.state import hooks_of
from fxopt.names import is_users, named_by, names_in, names_stored
from fxopt.reach.code import Code
from fxopt.reach.containers import MOST_BYTES, built_in, is_long, too_large
from fxopt.reach.entries import MISSING, content_of
from fxopt.reach.held import wrapped
from fxopt.torch_internals.python_math import is_of_numbers

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
# No change of these is looked for. An autocast that is a decorator keeps, for its exit, what it found at its entry.
_TELL_NOTHING = (*_NUMBERS, type, torch.autocast)


class Reach:
    """The names that code of `model` reads outside of it, and what they hold now.

    Args:
        without: submodules whose code does not count.

    Attributes:
        once: what the code may do that a look would do to the user's own object, "" if there is nothing.
        barred: what functions may do of that kind, by their code: it counts only if they are called.
        question: what the code may ask that a call answers otherwise than a trace, "" if there is nothing.
        spaces: the globals of the functions that ask isinstance(), or compute with functions of math by their own name.
    """

    def __init__(self, model: nn.Module, without: Iterable[nn.Module] = ()):
        apart = {inner for module in without for inner in module.modules()}
        modules = [module for module in model.modules() if module not in apart]
        code = Code.behind([*modules, *hooks_of(modules)], without=apart)
        self.once, self.question = "", first_question(code.functions.values())
        asking = filter(_asks_of_sizes, code.functions.values())
        self.spaces = list({id(function.__globals__): function.__globals__ for function in asking}.values())
        self.barred: dict[CodeType, str] = {}
        self._seen = set(map(id, model.modules()))
        self._names: list[tuple[Any, str, Any]] = []  # owner (a dict, a class or a cell), name, value
        self._contents: list[tuple[str, Any, Any]] = []  # name, container, what it holds
        for function in code.functions.values():
            for _, where, name in named_by(function):
                if is_unseen(type(where[name])):
                    self.barred[function.__code__] = _use(name, where[name], f" in {function.__qualname__}()")
                else:
                    self._value(name, where, where[name])
            for name in names_stored(function.__code__):
                self._value(name, function.__globals__, function.__globals__.get(name, MISSING))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._value(name, cell, _read(cell, name))
            for given in (function.__defaults__, function.__kwdefaults__, vars(function)):
                self._value(function.__qualname__, None, given)
        for kind in code.classes:
            for name in code.names & vars(kind).keys():
                self._value(name, kind, vars(kind)[name])
        for value in code.held:
            kind = type(value)
            if is_users(kind.__module__) and not is_plain_object(kind) and not is_unseen(kind):
                self._value(kind.__name__, None, value)  # a copy of a model shares it
            elif kind is ContextVar:
                self._value(value.name, None, value)
        if "environ" in code.names:
            self._value("os.environ", None, os.environ)
        if code.too_many:
            self.once = f"{code.too_many}, too many to see what changes them"
        caches = [value for value in code.held if isinstance(value, _CACHED)]
        self._caches = [(cache, cache.cache_info().misses) for cache in caches]

    def changed(self) -> str:
        """The first name that holds something else now; "" where none does."""
        for owner, name, value in self._names:
            if _read(owner, name) is not value:
                return name
        return next((name for name, value, held in self._contents if not _same(_content(value), held)), "")

    def put_back(self) -> None:
        for owner, name, value in self._names:
            if _read(owner, name) is not value:
                _write(owner, name, value)
        for _, value, held in self._contents:
            if not _same(_content(value), held):
                refill(value, held)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()

    def _value(self, name: str, owner: Any, value: Any) -> None:
        if owner is not None:
            self._names.append((owner, name, value))
        if isinstance(value, ContextVar):
            self._value(value.name, value, _read(value, name))
        if isinstance(value, _TELL_NOTHING) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if is_unseen(type(value)):
            self.once = _use(name, value)
        elif isinstance(value, Iterator) and not is_plain_object(type(value)):
            self.once = f"take the next item of {name}, an iterator, which a graph would do only once"
        elif large := too_large(value):
            self.once = f"change {name}, which {large}, more than each call can compare"
        held = value if isinstance(value, tuple) else _content(value)
        if held is not None and held is not value:
            self._contents.append((name, value, held))
        items = held.values() if isinstance(held, dict) else held if isinstance(held, (list, set, tuple)) else ()
        for item in (*(() if is_long(value) else items), *wrapped(value)):
            self._value(name, None, item)


_CACHED = type(functools.lru_cache(len))


def _use(name: str, value: Any, where: str = "") -> str:
    return f"use {name} ({type(value).__name__}){where}, of which a change would be neither seen nor undone"


def _asks_of_sizes(function: FunctionType) -> bool:
    names = names_in(function.__code__)[0]
    return "isinstance" in names or any(is_of_numbers(function.__globals__.get(name)) for name in names)


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, CellType):
        return content_of(owner)
    if isinstance(owner, ContextVar):
        try:
            return owner.get()
        except LookupError:
            return MISSING
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, CellType):
        owner.cell_contents = value
    elif isinstance(owner, ContextVar):
        owner.set(None if value is MISSING else value)
    elif isinstance(owner, dict):
        owner.pop(name) if value is MISSING else owner.__setitem__(name, value)
    else:
        setattr(owner, name, value)


def _content(value: Any) -> Any:
    """That of a module outside of the tree, too, and of an object with a way of its own to be copied."""
    held = content(value)
    if held is None and (isinstance(value, nn.Module) or is_users(type(value).__module__)):
        return attributes(value)
    return held


def content(value: Any) -> Any:
    """What a container or plain object holds, by reference; None for anything else, and for large arrays."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= MOST_BYTES else None
    if isinstance(value, BYTES):
        return value[:]
    if value is os.environ:
        return frozenset(value.items())
    if isinstance(value, dict):
        return dict(built_in(value).items(value))
    if isinstance(value, (set, list, deque)):
        base = built_in(value)
        return (set if base is set else list)(base.__iter__(value))
    if is_plain_object(type(value)) and not isinstance(value, nn.Module):
        return attributes(value)
    return None


def _same(now: Any, held: Any) -> bool:
    if isinstance(held, np.ndarray):
        return bool(now.tobytes() == held.tobytes())
    if type(now) is not type(held) or len(now) != len(held):
        return False
    if isinstance(held, dict):
        return all(key in now and now[key] is value for key, value in held.items())
    return all(map(lambda a, b: a is b, now, held)) if isinstance(held, list) else now == held


def refill(value: Any, held: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = held
    elif isinstance(value, BYTES):
        value[:] = held
    elif value is os.environ:
        value.clear()
        value.update(held)
    elif isinstance(value, dict):
        base = built_in(value)
        base.clear(value)
        for key, item in held.items():
            base.__setitem__(value, key, item)
    elif isinstance(value, (set, list, deque)):
        base = built_in(value)
        base.clear(value)
        getattr(base, "update" if base is set else "extend")(value, held)
    else:
        for name in attributes(value).keys() - held.keys():
            object.__delattr__(value, name)
        for name, item in held.items():
            object.__setattr__(value, name, item)
