"""The symbol table of a trace: torch's ShapeEnv, less the guards that only choose strides.

A size that depends on data stays a symbol of its own: what torch's fake operators take for granted about it (u0 == s0,
where it meets another size) is kept as a condition, and never makes it the other size.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.utils._sympy.functions import Max
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fxopt.torch_internals.raising import harmless_answer
from fxopt.torch_internals.symbols import unless_empty

aten = torch.ops.aten

# Operators whose output sizes do not depend on which of two sizes is larger or whether one is 1. Inequalities that
# their fake implementations ask about (which convolution backend, view or copy) choose strides only, and are no guards.
_SIZES_BY_EQUALITY = frozenset(
    {
        aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum, aten.tensordot,
        aten.conv1d, aten.conv2d, aten.convolution, aten.scaled_dot_product_attention,
        aten.batch_norm, aten.gru, aten.lstm, aten.reshape, aten.view, aten.flatten, aten.contiguous, aten.clone,
    }
)  # fmt: skip


# Operators for which it matters whether a size is 0: they give other sizes, or an error that a rewrite might not give.
_SIZES_BY_EMPTINESS = frozenset(
    {
        aten.cat, aten.stack, aten.squeeze, aten.squeeze_, aten.arange,
        aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.aminmax, aten.median,
    }
)  # fmt: skip

# Operators that ask whether a size is 1 only to choose strides.
_STRIDES_BY_ONE = frozenset({aten.embedding_bag, aten._embedding_bag})


class TraceShapeEnv(ShapeEnv):
    """Answers some questions of fake implementations from the hints, without a guard: inequalities asked inside an
    operator of `_SIZES_BY_EQUALITY`, and whether something is empty, which elsewhere decides about strides and errors.
    What depends on data is not empty there: `logsumexp` of `x[mask]` asks.

    Attributes:
        operator: the overload whose fake implementation runs now, None in the user's code.
        symbolic_len, gave_len: whether len(tensor) gives a symbolic size as x.shape[0] does, and whether one was given.
        asks_cuts: whether a slice asks whether there are so many items, or its size is a term.
        on_number: is called with each term of which a number is made.
        on_question: answers a condition on data that both answers are good for, or gives None.
        raised: errors that answered questions, with the name of the Python module that asked, and may have caught them.
        decided: conditions on numbers that depend on data, as they were taken for granted.
    """

    operator: Any = None
    symbolic_len = True
    gave_len = False
    asks_cuts = True
    on_number: Callable[[sympy.Expr], None] | None = None
    on_question: Callable[[sympy.Basic], bool | None] | None = None
    _proven = False

    def __init__(self) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=False)
        self.raised: list[tuple[Exception, str]] = []
        self.decided: dict[sympy.Basic, None] = {}

    def size(self, name: str, hint: int, positive: bool) -> torch.SymInt:
        """A size of its own, which may be 0 and 1; at least 1 if it is `positive`."""
        source = ConstantSource(name)
        # positive=None: torch's default declares sizes positive, and answers `if x.shape[0] == 0` without a guard.
        symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC, None, positive=positive or None)
        if not positive:
            self.var_to_range[symbol] = ValueRanges(0, int_oo)
        return self.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]

    def unknown(self, kind: type) -> torch.SymFloat | torch.SymBool:
        """A number of this kind, of which nothing is known."""
        make = self.create_unbacked_symfloat if kind is torch.SymFloat else self.create_unbacked_symbool
        with self.ignore_fresh_unbacked_symbols():
            return make()

    def _get_user_frame(self) -> None:
        """Nobody reads which line of the user's asked first, and to know the files that are torch's own takes 0.3 s."""

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> Any:
        """Up to torch 2.12 an error about a size that depends on data cannot be worded where no line is known."""
        return super()._get_stack_summary(is_debug, framework_loc or "")

    def _create_fx_call_function(self, op: Any, args: Any) -> tuple[None, bool]:
        """Nobody validates a translation of the guards, which is what these nodes are for."""
        return None, False

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        if self.on_number is not None and isinstance(orig_expr, sympy.Expr):
            self.on_number(orig_expr)
        try:
            return self._evaluated(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            frame = _asking()
            if isinstance(orig_expr, Boolean) and (answer := _answer(self, orig_expr, frame)) is not None:
                self.guard_or_defer_runtime_assert(orig_expr if answer else sympy.Not(orig_expr), "")
                return sympy.true if answer else sympy.false
            if _is_about_emptiness(getattr(self.operator, "overloadpacket", None), orig_expr):
                return sympy.false if isinstance(orig_expr, sympy.Eq) else sympy.true
            self.raised.append((error, frame.f_globals.get("__name__", "")))
            raise

    def _evaluated(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(self.operator, "overloadpacket", None)
        if (
            isinstance(orig_expr, Relational)
            and _is_about_strides(packet, orig_expr)
            and not free_unbacked_symbols(orig_expr)
        ):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            equal = (isinstance(orig_expr, sympy.Eq) and answer) or (isinstance(orig_expr, sympy.Ne) and not answer)
            if not equal:
                return answer
        if self._has_elements(orig_expr) or self._has_room(orig_expr):
            return sympy.true
        if isinstance(orig_expr, sympy.Eq | sympy.Ne) and self._are_one_unless_empty(orig_expr):
            return sympy.true if isinstance(orig_expr, sympy.Eq) else sympy.false
        if isinstance(orig_expr, sympy.Eq | sympy.Ne) and self._have_equal_factors(orig_expr):
            return sympy.true if isinstance(orig_expr, sympy.Eq) else sympy.false
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def _have_equal_factors(self, question: sympy.Eq | sympy.Ne) -> bool:
        """s0 * s1 == s2 * s3, where a loss meets logits and labels of [B, L] that were flattened: whether s0 == s2 and
        s1 == s3, which is a guard for each. That of the products would say little of either. Of s1 == s2 * s3 one is 1.
        """
        factors = [sympy.Mul.make_args(side) for side in question.args]
        one, other = ([term for term in side if term not in rest] for side, rest in (factors, factors[::-1]))
        if len(factors[0]) + len(factors[1]) < 3 or not all(map(self._is_input_size, one + other)):
            return False
        known = {**self.backed_var_to_val, sympy.S.One: sympy.S.One}
        place = {term: number for number, term in enumerate(self.backed_var_to_val)}  # of equal ones, outer first
        sides = (sorted(side, key=lambda term: (-known[term], place[term])) for side in (one, other))
        pairs = [*itertools.zip_longest(*sides, fillvalue=sympy.S.One)]
        if not pairs or any(known[a] != known[b] for a, b in pairs):
            return False
        return all(super(TraceShapeEnv, self).evaluate_expr(sympy.Eq(a, b)) for a, b in pairs)

    def _are_one_unless_empty(self, question: sympy.Eq | sympy.Ne) -> bool:
        """8 * Max(1, s0) == 8 * s0, where strides meet sizes: whether no size is 0, which is a guard for each."""
        maxima = question.atoms(sympy.Max, Max)
        if not maxima or free_unbacked_symbols(question) or unless_empty(question.lhs) != unless_empty(question.rhs):
            return False
        factors = {factor for largest in maxima for factor in sympy.Mul.make_args(unless_empty(largest))}
        return self._are_present(sorted((factor for factor in factors if factor.free_symbols), key=str))

    def _are_present(self, sizes: list[sympy.Expr]) -> bool:
        """Whether these are at least 1, and if so guards say that."""
        present = [sympy.Ge(size, 1) for size in sizes]
        if not present or not all(one.xreplace(self.backed_var_to_val) == sympy.true for one in present):
            return False
        return all(super(TraceShapeEnv, self).evaluate_expr(one) for one in present)

    def _has_elements(self, question: Any) -> bool:
        """Where x.reshape(a, b, -1) asks whether x has elements, or else the other sizes tell how many: whether it has,
        which is a guard for each size instead of one that is too much for a capture to be told of."""
        if not isinstance(question, sympy.Or) or free_unbacked_symbols(question):
            return False
        counts = [term.lhs for term in question.args if isinstance(term, sympy.Gt) and term.rhs == 0]
        factors = sympy.Mul.make_args(counts[0]) if counts else ()
        return self._are_present([size for size in factors if size.free_symbols])

    def _has_room(self, question: Any) -> bool:
        """Where an fft asks whether memory has room for a tensor whose elements it counts in another way: whether no
        size is 0, if that makes both counts one."""
        terms = question.args if isinstance(question, sympy.Or) and not free_unbacked_symbols(question) else ()
        for term in terms:
            if isinstance(term, sympy.Le) and sympy.expand(unless_empty(term.rhs) - unless_empty(term.lhs)) == 0:
                sizes = {size for largest in term.atoms(sympy.Max, Max) for size in largest.free_symbols}
                return not sizes or self._are_present(sorted(sizes, key=str))
        return False

    def guard_or_defer_runtime_assert(self, orig_expr: Any, *args: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        """What torch would assert at run time; it believes it from here on."""
        before = self.num_deferred_runtime_asserts
        answer = super().guard_or_defer_runtime_assert(orig_expr, *args, **kwargs)
        if self.num_deferred_runtime_asserts != before:
            self.decided[orig_expr] = None
        return answer

    def learn(self, unknown: sympy.Expr, known: sympy.Expr) -> None:
        """A size that depends on data was proved to be `known` for every input, and is that from now on."""
        if unknown in self.var_to_range:  # a bound of int64 on 5 * s0 would be rounded, and asserted not to be
            self.var_to_range[unknown] = ValueRanges(0, int_oo)  # type: ignore[index]
        self._proven, fact = True, sympy.Eq(unknown, known)
        self.size_like.difference_update(fact.free_symbols)  # torch keeps those from what may be 0 or 1
        try:
            super()._maybe_guard_rel(fact)
        finally:
            self._proven = False

    def _maybe_guard_rel(self, expr: Any) -> None:  # type: ignore[override]
        """What torch learns from a guard. From a condition on data it learns bounds of the number alone."""
        if isinstance(expr, sympy.Eq) and all(map(self._is_input_size, expr.args)):
            self._make_one(*expr.args)
        elif not free_unbacked_symbols(expr):
            super()._maybe_guard_rel(expr)
        elif isinstance(expr, sympy.And):
            for term in expr.args:
                self._maybe_guard_rel(term)
        elif isinstance(expr, Relational) and not isinstance(expr, sympy.Ne) and len(expr.free_symbols) == 1:
            self._refine_ranges(expr)

    def _is_input_size(self, term: Any) -> bool:
        return isinstance(term, sympy.Symbol) and term in self.backed_var_to_val

    def _make_one(self, a: Any, b: Any) -> None:
        """What torch makes of a == b, without solving it: a cat of 1500 columns has 1499 of these."""
        bounds = self.var_to_range[a] & self.var_to_range[b]
        for symbol in (a, b):
            if self.var_to_range[symbol] != bounds:
                self._update_var_to_range(symbol, bounds)
        replaced, kept = sorted((a, b), key=lambda symbol: symbol.name, reverse=True)
        self._set_replacement(replaced, self._find(kept), "equal sizes")

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        if self._proven or a in self.replacements or not free_unbacked_symbols(a):
            super()._set_replacement(a, tgt, msg)


_ASK = frozenset({"torch", "torch.fx.experimental.sym_node", "torch.fx.experimental.recording", __name__})


@functools.cache
def _caches() -> list[Callable[[], None]]:
    return [method.cache_clear for method in vars(ShapeEnv).values() if hasattr(method, "cache_clear")]


def forget_answers() -> None:
    """Clear torch's caches of answers. Each keeps the environment that was asked, with all that it holds."""
    for clear in _caches():
        clear()


def _asking() -> Any:
    """The frame that asks for the truth or the number of something symbolic, in front of torch's own methods."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in _ASK or frame.f_code.co_name == "evaluate_sym_node":
        frame = frame.f_back
    return frame


def _answer(environment: TraceShapeEnv, question: Boolean, frame: Any) -> bool | None:
    """What a condition on data is taken to be: where one answer leads to an error, the other one."""
    if question.is_Symbol:  # a number, which is asked for itself
        return None
    answer, others = harmless_answer(frame), environment.on_question
    return others(question) if answer is None and others and not environment.operator else answer


def _is_about_strides(packet: Any, question: Relational) -> bool:
    if packet in _SIZES_BY_EQUALITY:
        return True
    if _is_about_emptiness(packet, question):
        return True
    return isinstance(question, (sympy.Eq, sympy.Ne)) and 1 in question.args and packet in _STRIDES_BY_ONE


def _is_about_emptiness(packet: Any, question: Any) -> bool:
    """Whether an operator asks if something is empty that gives the same sizes either way."""
    if packet is None or packet in _SIZES_BY_EMPTINESS or not isinstance(question, (sympy.Eq, sympy.Ne)):
        return False
    return 0 in question.args


@contextmanager
def questions(environment: Any) -> Iterator[list[sympy.Basic]]:
    """What is asked about sizes meanwhile, and answered without a guard. Without a symbol table nothing is. Inside
    another `questions`, the inner one alone is told.
    """
    asked: list[sympy.Basic] = []

    def suppress(expr: Any, value: Any) -> None:  # called before a guard is added
        if not environment._suppress_guards_tls():
            asked.append(expr)
            suppressed.enter_context(environment.suppress_guards())

    with ExitStack() as suppressed:
        if environment is not None:
            suppressed.callback(setattr, environment, "_check_frozen", environment._check_frozen)
            environment._check_frozen = suppress
        yield asked
    if asked:
        ShapeEnv._inner_evaluate_expr.cache_clear()  # the answers, without their guards
