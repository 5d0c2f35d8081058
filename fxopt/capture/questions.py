"""What Python answers otherwise at a call than in a trace: time, random bytes, exact types of tensors and sizes."""

from __future__ import annotations

import datetime
import dis
import functools
import os
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from fxopt.names import names_in, pairs_in
from fxopt.reach.code import Code

_ALWAYS_NEW = {"time", "uuid", "secrets"}  # modules; sleep gives no answer
_TYPE, _NUMBERS = {"type", "__class__"}, {"int", "float", "bool"}
_TRACED = {"Tensor", "Parameter", *_NUMBERS}
_COMPARED = {"IS_OP", "COMPARE_OP", "CONTAINS_OP"}
_OF_DATES = {"now", "utcnow", "today"}


def question_of(module: nn.Module) -> str:
    """Why the code of a module, but for its submodules, cannot be traced: what it may ask. "" where it asks nothing."""
    return first_question(Code.behind([module], without=module.children()).functions.values())


def first_question(functions: Iterable[types.FunctionType]) -> str:
    return next(filter(None, map(_question_in, functions)), "")


def _question_in(function: types.FunctionType) -> str:
    if clock := _clock_in(function):
        return f"may ask {clock}, whose answer a graph would keep"
    if _compares_types(function.__code__):
        return "may compare the exact type of a tensor or size, which is another one in a trace (isinstance is not)"
    return ""


@functools.cache
def _compares_types(code: types.CodeType) -> bool:
    """Whether it holds `type(x) is torch.Tensor`, `case int()` or the like, as far as can be told from its names."""
    inner = any(_compares_types(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    if inner or _TRACED.isdisjoint(code.co_names):
        return inner
    steps = list(dis.get_instructions(code))
    named = [number for number, step in enumerate(steps) if step.argval in _TRACED and not _is_dtype(step)]
    asked = {(steps[number].argval, step.opname) for number in named for step in steps[number + 1 : number + 4]}
    compares = any(operator in _COMPARED for _, operator in asked) and not _TYPE.isdisjoint(code.co_names)
    return compares or any(operator == "MATCH_CLASS" and name in _NUMBERS for name, operator in asked)


def _is_dtype(step: dis.Instruction) -> bool:
    """Whether it reads torch.bool or the like."""
    return step.opname == "LOAD_ATTR" and step.argval in _NUMBERS


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
