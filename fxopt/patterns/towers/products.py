"""Products of columns, summed up: mixtures of experts, whatever operators spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.towers.terms import Terms, added, contracted, summed
from fxopt.shape.sizes import shape_of

if TYPE_CHECKING:
    from fxopt.patterns.towers.columns import Columns

aten = torch.ops.aten
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _factors(columns: Columns, node: Node) -> list[Tensor] | None:
    """Both factors of a product: of this graph, or columns from outside; at least one of them a step's."""
    operands = _operands(node)
    if len(operands) != 2 or not all(isinstance(operand, Node) for operand in operands):
        return None
    found = [columns.values.get(operand, columns.read(operand)) for operand in operands]
    factors = [factor for factor in found if isinstance(factor, Tensor)]
    return factors if len(factors) == 2 else None


def _product(columns: Columns, node: Node) -> Terms | None:
    factors = _factors(columns, node)
    if factors is None:
        return None
    left, right = factors
    rank = len(shape_of(node))
    if node.target is aten.mul.Tensor:
        dims = _LETTERS[:rank]
        own = [dims[rank - t.dim() :] for t in factors]
    elif node.target is aten.einsum.default:
        own, dims = _equation(node.args[0], [t.dim() for t in factors])  # type: ignore[arg-type]
    else:
        if left.dim() != right.dim() or left.dim() < 2:
            return None
        lead = _LETTERS[: left.dim() - 2]
        own, dims = [lead + "yz", lead + "zx"], lead + "yx"
    return _with_batch(columns, node, factors, own, dims)


def _with_batch(columns: Columns, node: Node, factors: list[Tensor], own: list[str], dims: str) -> Terms | None:
    """The batch is one dim of both factors and of the result."""
    batch = dims[columns.batch_dim(node) or 0] if len(dims) == len(shape_of(node)) else None
    for operand, letters in zip(_operands(node), own, strict=True):
        at = columns.batch_dim(operand)
        if batch is None or at is None or letters[at] != batch or len(set(letters)) < len(letters):
            return None
    terms = contracted(factors[0], own[0], factors[1], own[1], dims)
    if terms is None or not columns.has_shape(node, terms.left[..., 0]):
        return None
    return terms


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


def _operands(node: Node) -> list[Any]:
    arguments: Any = node.args
    return list(arguments[1] if node.target is aten.einsum.default else arguments[:2])


def _equation(text: str, ranks: list[int]) -> tuple[list[str], str]:
    """Letters of both operands and of the result; none where it uses more of einsum than letters."""
    left, arrow, dims = text.replace(" ", "").partition("->")
    own = left.split(",")
    if not arrow or "." in text or list(map(len, own)) != ranks:
        return ["", ""], "?"
    return own, dims


HANDLERS: dict[Any, Callable[[Columns, Node], Terms | None]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.matmul.default, aten.bmm.default, aten.einsum.default), _product),
    aten.sum.dim_IntList: _sum,
    aten.add.Tensor: _add,
}
