"""Which dims of the inputs are layouts and no lengths, by what a trace has asked about their sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import sympy
from sympy.core.relational import Relational
from torch import Tensor

from fxopt.capture.captured import Capture
from fxopt.capture.guards import conditions
from fxopt.capture.inputs import Dim, FakeInputs, Inputs
from fxopt.shape.floors import divisions_in


def alike(captures: Iterable[Capture], inputs: Inputs) -> list[Capture]:
    """Those of the same arguments, but for sizes."""
    ranks = [tensor.dim() for tensor in inputs.tensors]
    return [each for each in captures if each.in_spec == inputs.spec and [t.ndim for t in each.inputs] == ranks]


def varied(captures: Iterable[Capture], inputs: Inputs) -> frozenset[Dim]:
    """Dims that captures `alike` took for layouts, and that have another size now: they are lengths."""
    fixed = (dim_and_size for each in captures for dim_and_size in each.guards.static)
    return frozenset((i, d) for (i, d), size in fixed if size > 1 and inputs.tensors[i].shape[d] not in (0, 1, size))


def no_lengths(fakes: FakeInputs, tensors: Sequence[Tensor], varied: Collection[Dim]) -> set[Dim]:
    """Dims that are better static: dim 0 of lengths [F, B], which a model takes for F features with any number of bags,
    or, where there is none, dims >= 1 under anything but plain comparisons, unless they have `varied`.
    """
    complicated = [expr for expr in conditions(fakes.shape_env) if not _compares(expr)]
    features = {
        dim
        for expr in complicated
        for divided, count in divisions_in(expr)
        for dim in _dims(divided, fakes)
        if dim[1] == 0 and tensors[dim[0]].shape[0] == count and len(divided.free_symbols) > 1
    }
    return features or {dim for expr in complicated for dim in _dims(expr, fakes) if dim[1] >= 1}.difference(varied)


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
