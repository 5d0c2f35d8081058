"""Constants in a graph: Python numbers, and tensors that hold one number known at capture."""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten
Number = int | float

_FILLED = {
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), 1),
}
_FILLED_WITH = {  # operator: position of its fill value
    aten.full_like.default: 1,
    aten.full.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}


def constant_of(value: object) -> Number | None:
    """The number that every element of `value` holds, None where it is not one known number."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Node):
        return None
    if value.target in _FILLED:
        return _FILLED[value.target]
    if value.target in _FILLED_WITH:
        return constant_of(value.args[_FILLED_WITH[value.target]])
    return _literal(value) if value.meta.get("literal") else None


def _literal(node: Node) -> Number | None:
    """torch.tensor(3) inside forward."""
    tensor = getattr(node.graph.owning_module, str(node.target))
    return tensor.item() if tensor.numel() == 1 and not tensor.is_complex() else None
