"""Python's functions of a size, as in `scores / math.sqrt(x.shape[1])`: while a trace runs they are terms.

Python's own must return a float, which would fix the size. The graph calls them again, so its numbers are eager's.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.utils._sympy.functions as terms
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.torch_internals.patches import Change
from fxopt.torch_internals.python_sizes import Globals, asked_by_user
from fxopt.torch_internals.symbols import expression
from fxopt.torch_internals.tracing import number_proxy, record

_TERMS = {
    math.sqrt: terms.OpaqueUnaryFn_sqrt,
    math.log: terms.OpaqueUnaryFn_log,
    math.log2: terms.OpaqueUnaryFn_log2,
    math.exp: terms.OpaqueUnaryFn_exp,
}


def is_of_numbers(value: Any) -> bool:
    """Whether it is one of the functions that stay terms, or their module."""
    return value is math or (type(value) is type(math.sqrt) and value in _TERMS)


def as_terms(spaces: Iterable[dict[str, Any]], tracer: Any) -> Iterator[Change]:
    """These functions and their module in these globals of the user's code, under whatever name. Other code is not
    touched, and other threads that run the same code get Python's own functions and numbers.
    """
    tracing, here = weakref.ref(tracer), threading.get_ident()
    recorded = {original: _recorded(original, tracing, here) for original in _TERMS}

    class Math(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(math, name)
            return recorded.get(value, value) if threading.get_ident() == here and is_of_numbers(value) else value

    instead: dict[int, Any] = {id(original): function for original, function in recorded.items()}
    instead[id(math)] = Math(math.__name__)
    for space in spaces:
        names = [name for name, value in space.items() if id(value) in instead]
        yield from ((Globals(space), name, instead[id(space[name])]) for name in names)


def _recorded(original: Callable[..., float], tracing: weakref.ref, here: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*numbers: Any) -> Any:
        known = threading.get_ident() != here or not any(map(_is_of_sizes, numbers))
        tracer = None if known or not asked_by_user() else tracing()
        if tracer is None:
            return original(*numbers)
        found = [_called(original, each, tracer) if _is_of_sizes(each) else original(each) for each in numbers]
        return functools.reduce(operator.truediv, found)  # as Python computes log(x, base)

    return function


def _is_of_sizes(number: Any) -> bool:
    return type(number) in (torch.SymInt, torch.SymFloat) and not free_unbacked_symbols(number)


def _called(original: Callable[..., float], number: Any, tracer: Any) -> Any:
    proxy = tracer.create_proxy("call_function", original, (number_proxy(number, tracer),), {})
    argument = expression(number)
    term = _TERMS[original](terms.ToFloat(argument) if type(number) is torch.SymInt else argument)
    result = number.node.shape_env.create_symfloatnode(term, hint=original(number.node.hint))
    record(result, proxy, tracer)
    return result
