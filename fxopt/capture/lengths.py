"""Which dims of the inputs are layouts and no lengths, by what a trace has asked about their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from sympy.core.relational import Relational
from torch import Tensor

from fxopt.capture.guards import conditions
from fxopt.capture.inputs import Dim, FakeInputs
from fxopt.shape.floors import divisions_in


def no_lengths(fakes: FakeInputs, tensors: Sequence[Tensor]) -> set[Dim]:
    """Dims that are better static: dim 0 of lengths [F, B], which a model takes for F features with any number of bags,
    or, where there is none, dims >= 1 under anything but plain comparisons.
    """
    complicated = [expr for expr in conditions(fakes.shape_env) if not _compares(expr)]
    features = {
        dim
        for expr in complicated
        for divided, count in divisions_in(expr)
        for dim in _dims(divided, fakes)
        if dim[1] == 0 and tensors[dim[0]].shape[0] == count and len(divided.free_symbols) > 1
    }
    return features or {dim for expr in complicated for dim in _dims(expr, fakes) if dim[1] >= 1}


def _dims(expr: sympy.Basic, fakes: FakeInputs) -> set[Dim]:
    return {dim for symbol in expr.free_symbols for dim in fakes.sources.get(str(symbol), ())}


def _compares(expr: sympy.Basic) -> bool:
    """A plain comparison. Of an inequality a side may be any sum or product, as of the sizes that a view merges:
    B * (L - 1) > 0."""
    if not isinstance(expr, Relational):
        return False
    if isinstance(expr, sympy.Eq):
        return all(map(_is_plain, expr.args))
    return all(side.is_polynomial() for side in expr.args)


def _is_plain(side: sympy.Expr) -> bool:
    """A size or a multiple of one, a number, or both (offsets of B + 1)."""
    size = next(iter(side.free_symbols), sympy.Integer(0))
    return bool(side.coeff(size).is_Number and (side - side.coeff(size) * size).is_Number)
