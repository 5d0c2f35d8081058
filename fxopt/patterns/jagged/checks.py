"""Conditions on the numbers of ids of features that fxopt::jagged_offsets checks already, from the lengths alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.patterns.jagged.sums import Before, Sums
from fxopt.shape.conditions import require
from fxopt.shape.sizes import expression, shape_of


@dataclass(frozen=True)
class _Checked:
    """What a call asks: lengths with this number are not negative, and `left` ids behind the last bag are none (exact),
    or not less."""

    number: int
    left: sympy.Expr
    exact: bool


def find_jagged_checks(search: Search) -> Iterator[Match | Reject]:
    """Every condition that a call of fxopt::jagged_offsets asks too."""
    calls = list(calls_of_ours(search.graph, "fxopt::jagged_offsets"))
    if not calls:
        return
    sums = Sums(search.graph, search.aliases)
    checked = [found for call in calls for found in _checked(call, sums)]
    for node in search.calls(require):
        if all(_follows(term, sums, checked) for term in node.meta["terms"]):
            yield Match(node, {})


def _checked(call: Node, sums: Sums) -> Iterator[_Checked]:
    lengths, tensors, exact = call.args
    number = sums.number_of(lengths)  # type: ignore[arg-type]
    if number is not None:
        for ids in tensors:  # type: ignore[union-attr]
            left = expression(shape_of(ids)[0]) - Before(number, call.meta["bags"])  # type: ignore[arg-type]
            yield _Checked(number, left, bool(exact))


def _follows(term: sympy.Basic, sums: Sums, checked: list[_Checked]) -> bool:
    if isinstance(term, sympy.Eq):
        rest = sums.number(term.lhs - term.rhs)
        return any(known.exact and known.left in (rest, -rest) for known in checked)
    if not isinstance(term, sympy.Ge | sympy.Le):
        return False
    rest = sums.number(term.lhs - term.rhs if isinstance(term, sympy.Ge) else term.rhs - term.lhs)
    return any(_is_count(rest - left, known) for known in checked for left in (0, known.left))


def _is_count(term: sympy.Expr, known: _Checked) -> bool:
    """Whether it is a number of ids, from one bag to a later one."""
    last = [part for part in sympy.Add.make_args(term) if isinstance(part, Before)]
    if term == 0 or len(last) != 1 or last[0].args[0] != known.number:
        return bool(term == 0)
    first = last[0] - term
    if first != 0 and not (isinstance(first, Before) and first.args[0] == known.number):
        return False
    bags = sympy.expand(last[0].args[1] - (first.args[1] if first != 0 else 0))
    return all(factor > 0 for factor in bags.as_coefficients_dict().values())
