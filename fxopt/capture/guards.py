"""What must hold of the input sizes for a graph to be valid: torch's ShapeEnv guards, compiled to Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.utilities.iterables import connected_components
from torch.utils._sympy.solve import try_solve

from fxopt.capture.inputs import Dim
from fxopt.shape.floors import never_negative
from fxopt.torch_internals.symbols import ShapeEnv, as_python


@dataclass(frozen=True)
class Guards:
    """Conditions on the sizes of the flat tensor inputs, and on how they lie.

    equal: groups of dims (tensor, dim) that have one size; static: dims with the size they must have;
    relations: what remains, as Python text over symbol names (sources: where each symbol's value is read) or over t,
    the tensors;
    whole: tensors that must be contiguous; torn: groups of tensors of which one must not be.
    """

    equal: tuple[tuple[Dim, ...], ...] = ()
    static: tuple[tuple[Dim, int], ...] = ()
    relations: tuple[str, ...] = ()
    sources: tuple[tuple[str, Dim], ...] = ()
    whole: tuple[int, ...] = ()
    torn: tuple[tuple[int, ...], ...] = ()
    holds: Callable[[Sequence[Any]], bool] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", self._compiled())

    def describe(self) -> str:
        """One condition per line, dims written as x3.shape[0]."""
        lines = [" == ".join(map(_read, group)) for group in self.equal]
        lines += [f"{_read(dim)} == {size}" for dim, size in self.static]
        where = {name: _read(dim) for name, dim in self.sources}
        lines += [_rename(text, where) for text in self.relations]
        lines += [f"x{number}.is_contiguous()" for number in self.whole]
        lines += [f"not ({_all_contiguous(group, 'x{}')})" for group in self.torn]
        return "\n".join(lines)

    @property
    def beyond_sizes(self) -> Callable[[Sequence[Any]], bool] | None:
        """Whether what neither `equal` nor `static` says holds, or None where that is all."""
        rest = replace(self, equal=(), static=())
        return rest.holds if rest.relations or rest.whole or rest.torn else None

    def narrowed(self, static: Sequence[tuple[Dim, int]], equal: Sequence[tuple[Dim, ...]]) -> Guards:
        """These conditions, and further ones of the same kinds."""
        groups = [set(group) for group in self.equal]
        for group in equal:
            joined = set(group).union(*(other for other in groups if other & set(group)))
            groups = [other for other in groups if not other & joined] + [joined]
        fixed = {**dict(self.static), **dict(static)}
        return replace(self, equal=tuple(tuple(sorted(group)) for group in groups), static=tuple(fixed.items()))

    def __reduce__(self) -> tuple:
        return Guards, (self.equal, self.static, self.relations, self.sources, self.whole, self.torn)

    def _compiled(self) -> Callable[[Sequence[Any]], bool]:
        body = [f"    {name} = {_read(dim, 't[{}]')}" for name, dim in self.sources]
        for number, group in enumerate(self.equal):
            body.append(f"    e{number} = {_read(group[0], 't[{}]')}")
            for dim in group[1:]:
                body.append(f"    if {_read(dim, 't[{}]')} != e{number}: return False")
        body += [f"    if {_read(dim, 't[{}]')} != {size}: return False" for dim, size in self.static]
        body += [f"    if not t[{number}].is_contiguous(): return False" for number in self.whole]
        body += [f"    if {_all_contiguous(group, 't[{}]')}: return False" for group in self.torn]
        if self.relations:  # at a size without a quotient or a logarithm it does not hold
            body.append("    try:")
            body += [f"        if not ({text}): return False" for text in self.relations]
            body.append("    except (ArithmeticError, ValueError): return False")
        namespace: dict[str, Any] = {"math": math, "torch": torch}
        exec("def holds(t):\n" + "\n".join([*body, "    return True"]), namespace)
        return namespace["holds"]


def guards_of(
    shape_env: ShapeEnv,
    sources: dict[str, list[Dim]],
    static: dict[Dim, int],
    positive: set[Dim],
    answers: Sequence[str] = (),
) -> Guards:
    """Sort the environment's guards into equalities, static sizes and other relations.

    Args:
        sources: symbol name to the dims it stands for. static: dims traced with a fixed size.
        positive: dims that were taken to be at least 1.
        answers: further conditions over t, the tensors, because the traced code asked for more than sizes.
    """
    equalities: list[tuple[str, str]] = []
    fixed: dict[str, int] = {}
    others: list[sympy.Basic] = []
    at_least = {name: int(dims[0] in positive) for name, dims in sources.items()}
    for expr in conditions(shape_env):
        names = {str(s) for s in expr.free_symbols}
        if not names or not names <= set(sources):
            continue
        if isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Symbol:
            equalities.append((str(expr.lhs), str(expr.rhs)))
        elif (
            isinstance(expr, sympy.Eq)
            and {expr.lhs.is_Symbol, expr.rhs.is_Symbol} == {True, False}
            and (expr.lhs.is_Integer or expr.rhs.is_Integer)
        ):
            symbol, size = (expr.lhs, expr.rhs) if expr.lhs.is_Symbol else (expr.rhs, expr.lhs)
            fixed[str(symbol)] = int(size)
        elif (bound := _lower_bound(expr)) is not None:
            at_least[bound[0]] = max(bound[1], at_least[bound[0]])
        else:
            others.append(expr)
    equal: list[tuple[Dim, ...]] = []
    place = {name: number for number, name in enumerate(sources)}
    for members in connected_components((place, equalities)):
        dims = tuple(dim for name in sorted(members, key=place.__getitem__) for dim in sources[name])
        size = next((fixed[name] for name in members if name in fixed), None)
        if size is not None:
            static = {**static, **dict.fromkeys(dims, size)}
        elif len(dims) > 1:
            equal.append(dims)
    settled = {dim for dim, _ in static.items()}
    bounds = {name: bound for name, bound in at_least.items() if bound > 0 and sources[name][0] not in settled}
    used = sorted({str(s) for expr in others for s in expr.free_symbols} | set(bounds))
    return Guards(
        tuple(equal),
        tuple(sorted(static.items())),
        (
            *dict.fromkeys(as_python(expr) for expr in others),
            *(f"{name} >= {bound}" for name, bound in bounds.items()),
            *answers,
        ),
        tuple((name, sources[name][0]) for name in used),
    )


def conditions(shape_env: ShapeEnv) -> Iterator[sympy.Basic]:
    """The environment's guards, one term of a conjunction at a time, but for what holds for all sizes."""
    for guard in shape_env.guards:
        terms = guard.expr.args if isinstance(guard.expr, sympy.And) else (guard.expr,)
        yield from (term for term in map(_solved, terms) if not _always_holds(term))


def _solved(expr: sympy.Basic) -> sympy.Basic:
    """12 + s0 == 15, as a cat in front of a linear layer asks, as s0 == 3; s0 - 4 >= 0, as a cut asks, as s0 >= 4."""
    if isinstance(expr, Relational) and len(expr.free_symbols) == 1:
        (symbol,) = expr.free_symbols
        solved = try_solve(expr, symbol)
        if solved is not None and solved[1].is_Integer:
            return solved[0]
    return expr


def _always_holds(expr: sympy.Basic) -> bool:
    """L // 2 <= L, as a cut at a share of a length asks."""
    if isinstance(expr, sympy.Gt | sympy.Lt):
        return never_negative(expr.gts - expr.lts - 1)
    return isinstance(expr, sympy.Ge | sympy.Le) and never_negative(expr.gts - expr.lts)


def _lower_bound(expr: sympy.Basic) -> tuple[str, int] | None:
    """(symbol, smallest value) of conditions that say just this of a size, which is a natural number."""
    if not isinstance(expr, Relational) or not (expr.lhs.is_Symbol and expr.rhs.is_Integer):
        return None
    symbol, number = str(expr.lhs), int(expr.rhs)
    if isinstance(expr, sympy.StrictGreaterThan) or (isinstance(expr, sympy.Ne) and number <= 0):
        return symbol, number + 1
    return (symbol, number) if isinstance(expr, sympy.GreaterThan) else None


def _read(dim: Dim, tensor: str = "x{}") -> str:
    return f"{tensor.format(dim[0])}.shape[{dim[1]}]"


def _all_contiguous(tensors: Sequence[int], tensor: str) -> str:
    return " and ".join(f"{tensor.format(number)}.is_contiguous()" for number in tensors)


def _rename(text: str, where: dict[str, str]) -> str:
    import re

    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: where.get(m.group(), m.group()), text)
