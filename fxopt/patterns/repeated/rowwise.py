"""Which packed computations work row by row, so that rows can be computed a few at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.repeated.lanes import BY_DIM
from fxopt.patterns.repeated.trees import Leaf, Picked, Shared, Tree
from fxopt.shape.sizes import Size, depend_alike, expression, shape_of

aten = torch.ops.aten


def is_rowwise(tree: Tree, batch: Size) -> bool:
    """Whether row b of every lane depends on row b of what it reads: `batch` is dim 0 of each tensor, or of no use."""
    match tree:
        case Shared(node):
            return rows_of(node, batch) is not None
        case Leaf():
            joined = tree.pool.dim != 0 or rows_of(tree.bases[0], batch) is False
            return joined and rows_of(tree.bases[0], batch) is not None
        case Picked(inner):
            return is_rowwise(inner, batch)
    trees = [argument for argument in tree.args if isinstance(argument, Tree)]
    rows = rows_of(tree.node, batch)
    if rows is None or not all(is_rowwise(argument, batch) for argument in trees):
        return False
    operands = [operand for operand in tree.node.all_input_nodes if rows_of(operand, batch)]
    return _keeps_rows(tree.node, operands) if rows else not operands  # what sums up all rows has none


def _keeps_rows(node: Node, operands: list[Node]) -> bool:
    rank = max((len(shape_of(node)), *(len(shape_of(operand)) for operand in operands)))
    if node.target is aten.repeat.default:
        times: Any = node.args[1]
        return len(times) == len(shape_of(node.all_input_nodes[0])) and times[0] == 1
    if node.target in BY_DIM:
        named: Any = node.args[1] if len(node.args) > 1 else 0
        dims = named if isinstance(named, list | tuple) else [named]
        return len(operands) == 1 and 0 not in ([dim % rank for dim in dims] or [0])  # no dims: all of them
    if node.target is aten.linear.default:
        return operands == [node.args[0]]
    if node.target is aten.matmul.default:
        return len(operands) == 1
    return all(len(shape_of(operand)) == rank for operand in operands)


def rows_of(node: Node, batch: Size) -> bool | None:
    """Whether dim 0 is the batch; None where another one depends on it."""
    shape = shape_of(node)
    if any(depend_alike(size, batch) for size in shape[1:]):
        return None
    if shape and expression(shape[0]) == expression(batch):
        return True
    return None if shape and depend_alike(shape[0], batch) else False
