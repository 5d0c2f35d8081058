"""Symbolic sizes as terms: what torch's symbol table knows of a SymInt, and how it is told more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_symbols,
    free_unbacked_symbols,
    is_accessor_node,
    statically_known_true,
)
from torch.utils._sympy.functions import Max
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges


def expression(size: Any) -> sympy.Expr:
    """The size as a term over the symbols of the trace; equal terms are equal sizes."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


class _Printer(PythonPrinter):
    """Knows the functions that torch's does not."""

    def _print_OpaqueUnaryFn_log(self, term: sympy.Expr) -> str:
        return f"math.log({self._print(term.args[0])})"

    def _print_OpaqueUnaryFn_exp(self, term: sympy.Expr) -> str:
        return f"math.exp({self._print(term.args[0])})"


def as_python(term: sympy.Basic) -> str:
    """The text of a term, in Python that names `math` and `torch`."""
    return _Printer().doprint(term)


def unless_empty(term: sympy.Expr) -> sympy.Expr:
    """A stride for tensors that are not empty, of which torch counts a dim of 0 as one: 8 * s0 of 8 * Max(1, s0)."""
    return term.replace(sympy.Max, _without_one).replace(Max, _without_one)


def _without_one(*terms: sympy.Expr) -> sympy.Expr:
    left = [term for term in terms if term != 1]
    return left[0] if len(left) == 1 else sympy.Max(*terms)


def exact_quotient(product: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """The quotient of two products of sizes if all factors of the divisor are among those of the other; else None."""
    if not divisor.free_symbols:
        return None
    (number, factors), (other, others) = _factors(product), _factors(divisor)
    for factor in others:
        if factor not in factors:
            return None
        factors.remove(factor)
    return None if not other or number % other else sympy.Mul(number // other, *factors)


def _factors(term: sympy.Expr) -> tuple[sympy.Integer, list[sympy.Expr]]:
    """The number and the terms whose product is this one."""
    number, terms = sympy.S.One, []
    for factor in sympy.Mul.make_args(term):
        content, rest = factor.primitive()
        number *= content
        base, power = rest.as_base_exp()
        terms += [base] * int(power) if power.is_Integer and power > 0 else [rest]
    return number, [each for each in terms if each != 1]


def depends_on_data(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Whether it is computed from the numbers of a tensor, not from sizes alone."""
    return bool(free_unbacked_symbols(number.node.expr))


def is_settled(answer: Any, numbers: Sequence[Any]) -> bool:
    """Whether algebra alone tells a comparison of these numbers, or may when it is asked."""
    if isinstance(answer, bool) or (isinstance(answer, torch.SymBool) and answer.node.expr.is_Atom):
        return True
    one, *others = (number.node.expr.free_symbols for number in numbers)
    return isinstance(answer, torch.SymBool) and not one.isdisjoint(*others) if others else False


def static(size: int | torch.SymInt) -> int | None:
    """The size as an int when it is the same for every input, else None."""
    if isinstance(size, int):
        return size
    term = expression(size)
    return int(term) if term.is_number else None


def recorded_term(number: Any) -> sympy.Basic:
    """The term of a symbolic number as it was when the number was made: what was learned since is not put in."""
    return number.node._expr


def hint_of(size: torch.SymInt) -> int | None:
    """The size that it had while the model was captured; None where it depends on data."""
    return size.node.hint


def traced_sizes(sizes: Iterable[int | torch.SymInt], unknown: int) -> list[int]:
    """What sizes were while the model was captured; `unknown` for those that depend on data."""
    known = [size if isinstance(size, int) else hint_of(size) for size in sizes]
    return [unknown if size is None else size for size in known]


def hints_of(size: torch.SymInt) -> Mapping[sympy.Symbol, int]:
    """Every symbol of the size's trace that is known from an input, with the size that this had."""
    return size.node.shape_env.backed_var_to_val


def range_of(size: torch.SymInt) -> ValueRanges:
    """What the size can be."""
    return size.node.shape_env.bound_sympy(size.node.expr)


def never_negative(size: torch.SymInt) -> bool:
    """Whether this is known of it at sizes of 0 and 1, too, which torch.export leaves out of its ranges."""
    bounds, term = size.node.shape_env.bound_sympy, expression(size)
    # torch says of its own symbols that they are positive
    known = {s: sympy.Dummy(integer=True, nonnegative=bool(bounds(s).lower >= 0) or None) for s in term.free_symbols}
    return term.xreplace(known).is_nonnegative is True


def narrow(number: torch.SymInt, least: int, most: int) -> None:
    """Tell the symbol table the range of a number that is a symbol itself."""
    environment, symbol = number.node.shape_env, number.node.expr
    if symbol.is_Symbol and isinstance(environment, ShapeEnv):
        environment.var_to_range[symbol] &= ValueRanges(least, most)


def environment_of(size: torch.SymInt) -> Any:
    """The symbol table of the trace that the size belongs to."""
    return size.node.shape_env
