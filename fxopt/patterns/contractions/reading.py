"""From a graph to terms: operators that multiply and sum, and the views between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.contractions.terms import Dim, Factor, Names, Term, Unfit, dims_of
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import tensor_of
from fxopt.shape.spelled import Letters, spelled
from fxopt.shape.view_operators import COPIES, EXPANSIONS, through
from fxopt.shape.view_steps import Select, Slice, Step, moved

_SPREADS = EXPANSIONS | {torch.ops.aten.repeat.default}


class Reader:
    """Reads terms off one graph."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases

    def terms(self, node: Node, deepest: int) -> Iterator[Term]:
        """What `node` computes, read deeper and deeper."""
        last = 0
        for depth in range(deepest + 1):
            term = self.term(node, depth)
            if term is not None and len(term.inside) > last:
                last = len(term.inside)
                yield term

    def term(self, node: Node, depth: int = 0) -> Term | None:
        """What `node` computes, without its bias; None where it is no product or memory is edited in place.

        depth: how many operators deep what nobody else needs is read; what is made deeper is a factor.
        """
        names = Names()
        try:
            term = names.resolved(_Reading(self._aliases, names, node).call(node, depth))
        except Unfit:
            return None
        if self._aliases.edited(node) or any(self._aliases.edited(factor.node) for factor in term.factors):
            return None
        return term if all(len(set(factor.axes)) == len(factor.axes) for factor in term.factors) else None


class _Reading:
    def __init__(self, aliases: Aliases, names: Names, root: Node) -> None:
        self._aliases, self._names, self._dtype = aliases, names, root.meta["val"].dtype

    def read(self, node: Node, depth: int) -> Term:
        """A view, a product that nobody else needs, or else a factor."""
        try:
            if node.op == "call_function" and not self._aliases.edited(node):
                source, step = through(node, _SPREADS) or (node, None)
                if step is not None and not isinstance(step, Slice | Select) and node.target not in COPIES:
                    return self._view(source, step, depth if len(node.users) == 1 else 0)
                if depth and len(node.users) == 1:
                    return self.call(node, depth - 1, biased=False)
        except Unfit:
            pass
        return self._factor(node)

    def _factor(self, node: Node) -> Term:
        value = tensor_of(node)
        if value is None or value.dtype != self._dtype:
            raise Unfit
        dims = dims_of(value.shape)
        return Term(dims, (Factor(node, dims),))

    def _view(self, source: Node, step: Step, depth: int) -> Term:
        term = self.read(source, depth)
        dims = moved(self._names.resolved_dims(term.dims), step, self._names.halves, self._names.spread)
        if dims is None:
            raise Unfit
        return Term(dims, term.factors, term.inside)

    def call(self, node: Node, depth: int, biased: bool = True) -> Term:
        call = spelled(node)
        if call is None or not node.meta["val"].is_floating_point() or (call.bias is not None and not biased):
            raise Unfit
        nodes = [operand for operand, _ in call.operands]
        depths = [depth if nodes.count(operand) == 1 else 0 for operand in nodes]  # read twice, it is two factors
        terms = [(self.read(node, deep), letters) for deep, (node, letters) in zip(depths, call.operands, strict=True)]
        letters = self._unified(terms)
        if any(self._names.is_spread(dim) for letter, dim in letters.items() if letter not in call.out):
            raise Unfit  # the sum would count it
        factors = tuple(factor for term, _ in terms for factor in term.factors)
        inside = tuple(inner for term, _ in terms for inner in term.inside)
        return Term(tuple(letters.get(letter, ()) for letter in call.out), factors, (node, *inside))

    def _unified(self, terms: list[tuple[Term, Letters]]) -> dict[Any, Dim]:
        found: dict[Any, Dim] = {}
        for term, letters in terms:
            for letter, dim in zip(letters, term.dims, strict=True):
                if dim and found.get(letter):
                    self._names.unify(found[letter], dim)
                elif dim:
                    found[letter] = dim
        return found
