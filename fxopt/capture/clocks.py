"""What Python gives another answer to at each call: the time, and random bytes. A graph would have asked once."""

from __future__ import annotations

import datetime
import os
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from fxopt.names import names_in, pairs_in
from fxopt.reach import Code

_ALWAYS_NEW = {"time", "uuid", "secrets"}  # modules; sleep gives no answer
_OF_DATES = {"now", "utcnow", "today"}


def clock_of(module: nn.Module) -> str:
    """The name of a clock or of a source of random bytes that the code of a module may ask, but for its submodules."""
    return first_clock(Code.behind([module], without=module.children()).functions.values())


def first_clock(functions: Iterable[types.FunctionType]) -> str:
    return next(filter(None, map(_clock_in, functions)), "")


def _clock_in(function: types.FunctionType) -> str:
    pairs = pairs_in(function.__code__)
    found = [(name, function.__globals__.get(name)) for name in names_in(function.__code__)[0]]
    seen = set[tuple[str, int]]()
    while found:
        name, value = found.pop()
        if _is_clock(value):
            return f"{value.__module__ or value.__self__.__name__}.{value.__name__}"  # type: ignore[union-attr]
        if (name, id(value)) not in seen and (isinstance(value, types.ModuleType) or _is_date(value)):
            seen.add((name, id(value)))
            found += [(word, _member(value, word)) for before, word in pairs if before == name]
    return ""


def _member(value: Any, name: str) -> Any:
    return getattr(value, name, None) if isinstance(value, type) else vars(value).get(name)


def _is_date(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, datetime.date)


def _is_clock(value: Any) -> bool:
    if isinstance(value, types.BuiltinMethodType) and _is_date(value.__self__):
        return value.__name__ in _OF_DATES
    plain = isinstance(value, (types.BuiltinFunctionType, types.FunctionType))
    return value is os.urandom or (plain and value.__module__ in _ALWAYS_NEW and value.__name__ != "sleep")
