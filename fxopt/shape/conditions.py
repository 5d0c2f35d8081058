"""Conditions on sizes that depend on data: what a trace took for granted about them, asked at every call.

A trace of `x[mask] * y` needs the rows picked to be as many as those of y, which eager would ask at that operator. The
graph asks before anything depends on it; where the answer is no, the call is eager's, with eager's result or error.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxopt.shape.sizes import expression
from fxopt.torch_internals.dynamo import is_exporting
from fxopt.torch_internals.symbols import as_python


class OtherSizes(Exception):
    """Data gave sizes that a graph was not captured for: no error of the call, which is eager's."""


def require(condition: str, names: tuple[str, ...], *values: int | float) -> None:
    """Ask a condition in Python over `names`, which stand for `values`.

    Raises:
        OtherSizes: it does not hold.
    """
    if is_exporting():
        for term in _terms(condition):
            torch._check(_lambda(term, names)(*values))
    elif not _compiled(condition, names)(*values):
        found = ", ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))
        raise OtherSizes(f"expected {condition}, found {found}")


def unless_bad(check: Callable[..., Any], *given: Any) -> Any:
    """What `check` returns, which raises where data is bad.

    Raises:
        OtherSizes: it does: the call is eager's, which repairs the data.
    """
    try:
        return check(*given)
    except RuntimeError as error:
        raise OtherSizes(f"{check}: {error}") from None


ASKED = (require, unless_bad)


def arguments(terms: dict[sympy.Basic, None], numbers: dict[sympy.Symbol, Node]) -> tuple[Any, ...]:
    """The arguments of `require` for a conjunction; `numbers` are the nodes that give its symbols."""
    text = " and ".join(f"({as_python(term)})" for term in terms)
    return text, tuple(map(str, numbers)), *numbers.values()


def holds(condition: sympy.Basic, symbols: Sequence[sympy.Symbol], numbers: Iterable[Any]) -> bool:
    """Whether `require` would find it so for these numbers."""
    return _compiled(as_python(condition), tuple(map(str, symbols)))(*numbers)


def follows(node: Node) -> bool:
    """Whether a `require` holds for every input by what is known of its numbers now: floats may be no numbers."""
    if not all(symbol.is_integer for symbol in node.meta["symbols"]):
        return False
    known = {symbol: _term(number) for symbol, number in zip(node.meta["symbols"], node.args[2:], strict=True)}
    return all(term.xreplace(known) == sympy.true for term in node.meta["terms"])


def as_number(term: sympy.Basic) -> sympy.Basic:
    """The symbol of an item of a tensor of bools, which torch writes as u0 == 1, and any other term as it is."""
    return term.lhs if isinstance(term, sympy.Eq) and term.rhs == 1 else term


def _term(number: Any) -> sympy.Basic:
    return as_number(expression(number.meta["val"] if isinstance(number, Node) else number))


def _terms(condition: str) -> list[str]:
    """Of a conjunction, since `and` would ask for truth what is only traced."""
    asked = ast.parse(condition, mode="eval").body
    return [ast.unparse(term) for term in (asked.values if isinstance(asked, ast.BoolOp) else [asked])]


def _lambda(condition: str, names: tuple[str, ...]) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(names)}: {condition}", {"math": math, "torch": torch})


@functools.lru_cache(maxsize=4096)
def _compiled(condition: str, names: tuple[str, ...]) -> Callable[..., bool]:
    asked = _lambda(condition, names)

    def ask(*values: Any) -> bool:
        try:
            return bool(asked(*values))
        except (ArithmeticError, ValueError):
            return False

    return ask
