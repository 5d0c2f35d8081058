"""Products of columns, summed up: mixtures of experts, whatever operators spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.towers.terms import Terms, added, contracted, summed
from fxopt.shape.spelled import Letters, spelled

if TYPE_CHECKING:
    from fxopt.patterns.towers.columns import Columns

aten = torch.ops.aten


def _product(columns: Columns, node: Node) -> Terms | None:
    """Of two factors: of this graph, or columns from outside; at least one of them a step's."""
    call = spelled(node)
    if call is None or len(call.operands) != 2:
        return None
    found = [columns.values.get(operand, columns.read(operand)) for operand, _ in call.operands]
    factors = [factor for factor in found if isinstance(factor, Tensor)]
    batch = call.out[columns.batch_dim(node) or 0] if call.out else None
    if len(factors) < 2 or any(_batch(columns, operand, own) != batch for operand, own in call.operands):
        return None
    (_, left), (_, right) = call.operands
    terms = contracted(factors[0], left, factors[1], right, call.out)
    return terms if terms is not None and columns.has_shape(node, terms.left[..., 0]) else None


def _batch(columns: Columns, operand: Node, letters: Letters) -> Any:
    """The letter of the rows."""
    at = columns.batch_dim(operand)
    return None if at is None else letters[at]


def _sum(columns: Columns, node: Node) -> Terms | None:
    source: Any = node.args[0]
    dims: Any = node.args[1]
    value = columns.values.get(source)
    if not isinstance(value, Terms) or not isinstance(dims, list | tuple) or not dims or node.kwargs:
        return None
    rank = len(value.shape)
    if columns.batch_dim(source) in [dim % rank for dim in dims]:
        return None
    return summed(value, dims, len(node.args) > 2 and bool(node.args[2]))


def _add(columns: Columns, node: Node) -> Terms | None:
    values = [columns.values.get(argument) for argument in node.args[:2] if isinstance(argument, Node)]
    if node.kwargs or not all(isinstance(value, Terms) for value in values):
        return None
    if len(values) == 1:
        return values[0] if 0 in node.args[:2] else None  # type: ignore[return-value]
    made = added(*values)  # type: ignore[arg-type]
    return made if columns.has_shape(node, made.left[..., 0]) else None


HANDLERS: dict[Any, Callable[[Columns, Node], Terms | None]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.matmul.default, aten.bmm.default, aten.einsum.default), _product),
    aten.sum.dim_IntList: _sum,
    aten.add.Tensor: _add,
}
