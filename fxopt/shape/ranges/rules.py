"""The rules of value ranges: one for each operator that is understood."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.shape.calls import packet_of
from fxopt.shape.ranges import (
    rules_arithmetic,
    rules_bits,
    rules_bounds,
    rules_conditions,
    rules_indices,
    rules_movement,
    rules_reduce,
)
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.values import Values

_FEW = 1024  # elements of a constant that are told apart


def _attribute(op: Operation) -> Known | None:
    """Parameters and buffers can be assigned or loaded; literals of forward stay as they are."""
    if not op.node.meta.get("literal"):
        return None
    tensor = getattr(op.node.graph.owning_module, str(op.node.target))
    if tensor.is_complex() or tensor.layout is not torch.strided:
        return None
    because = "a constant of forward"
    numbers = tensor.detach().cpu().flatten()
    if tensor.dtype == torch.bool:
        return Known(Values.only(*map(int, numbers.unique().tolist())), because)
    if numbers.numel() <= _FEW:
        return Known(Values.only(*numbers.unique().tolist()), because)
    low, high = (end.item() for end in torch.aminmax(numbers.nan_to_num(0.0, torch.inf, -torch.inf)))
    return Known(Values(((low, high),), bool(numbers.isnan().any())), because)


def _part(op: Operation) -> Known | None:
    """One tensor of several: of a split, its source's elements; else what the operator says of that output."""
    source, position = op.node.args
    if not (isinstance(source, Node) and isinstance(position, int)) or source.op != "call_function":
        return None
    inner = Operation(op.ranges, source)
    inner.dtype = op.dtype
    packet = packet_of(source)
    if packet in rules_movement.SPLITS:
        return inner.known("self")
    if packet in rules_movement.LISTS:
        return inner.tensors("tensors")[position]
    parts = rules_indices.PARTS.get(packet, ())
    return parts[position](inner) if 0 <= position < len(parts) else None


ELEMENTWISE: dict[object, Rule] = {
    **rules_arithmetic.RULES,
    **rules_bits.RULES,
    **rules_bounds.ELEMENTWISE,
    **rules_movement.CASTS,
}
"""An element of the output depends on the elements of the arguments at its position."""

RULES: dict[object, Rule] = {
    "get_attr": _attribute,
    operator.getitem: _part,
    **ELEMENTWISE,
    **rules_bounds.SUBSTITUTIONS,
    **rules_conditions.RULES,
    **rules_indices.RULES,
    **rules_movement.RULES,
    **rules_reduce.RULES,
}
