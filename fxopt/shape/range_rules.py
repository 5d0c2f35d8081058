"""The rules of value ranges: one for each operator that is understood."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxopt.shape.range_algebra import cast
from fxopt.shape.range_operation import Known, Operation
from fxopt.shape.values import Values

aten = torch.ops.aten
Rule = Callable[[Operation], Known | None]


def _attribute(op: Operation) -> Known | None:
    """Parameters and buffers can be assigned or loaded; literals of forward stay as they are."""
    if not op.node.meta.get("literal"):
        return None
    tensor = getattr(op.node.graph.owning_module, str(op.node.target))
    if tensor.is_complex() or tensor.layout is not torch.strided:
        return None
    numbers = tensor.detach().cpu().flatten().unique().tolist()
    return Known(Values.only(*(int(n) if n is True or n is False else n for n in numbers)), "a constant of forward")


def _search(boundaries: str) -> Rule:
    def rule(op: Operation) -> Known | None:
        edges = op[boundaries].meta["val"].shape[-1]  # type: ignore[attr-defined]
        if not isinstance(edges, int) or op.dtype is None or edges > torch.iinfo(op.dtype).max:
            return None
        return Known(Values.between(0, edges), f"bucketize over {edges} edges")

    return rule


def _remainder(op: Operation) -> Known | None:
    divisor = op.operand("other").values
    assert op.dtype is not None
    if op.dtype.is_floating_point or len(divisor.intervals) != 1 or divisor.min != divisor.max or divisor.min == 0:
        return None
    d = divisor.min
    values = op.operand("self").values
    reduced = Values.between(0, d - 1) if d > 0 else Values.between(d + 1, 0)
    return op.known("self") if values.within(reduced) else Known(reduced, f"remainder by {d}")


def _clamp(op: Operation) -> Known | None:
    source = op.operand("self")
    if not source.values.intervals:
        return source
    low, high = source.values.min, source.values.max
    if op["min"] is not None:
        bound = op.operand("min").values
        if bound.nan or not bound.intervals:
            return None
        low, high = max(low, bound.min), max(high, bound.max)
    if op["max"] is not None:
        bound = op.operand("max").values
        if bound.nan or not bound.intervals:
            return None
        low, high = min(low, bound.min), min(high, bound.max)
    values = Values(((low, high),), source.values.nan)
    if source.values.within(values):
        return source
    return Known(values, f"clamped to {values}")


def _cast(op: Operation) -> Known | None:
    source = op.known("self")
    return Known(cast(source.values, op.dtype), source.because) if op.dtype is not None else None


RULES: dict[object, Rule] = {
    "get_attr": _attribute,
    aten.bucketize.Tensor: _search("boundaries"),
    aten.searchsorted.Tensor: _search("sorted_sequence"),
    aten.remainder.Scalar: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.clamp.default: _clamp,
    aten.clip.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.to.other: _cast,
    aten._to_copy.default: _cast,
    aten.type_as.default: _cast,
}
