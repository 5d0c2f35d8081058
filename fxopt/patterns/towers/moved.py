"""What a view, a concat or a stack makes of columns: torch's own operators move their numbers as they would the values.

They move those of two rows, with numbers of their own: one row would not tell the rows of `x.t().reshape(x.shape)` from
those of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.shape.sizes import expression, static

_SECOND = 1 << 40  # from a number of the first row to that of the second


def moved(
    node: Node, numbers: dict[Node, Tensor], batch: sympy.Expr, batch_dim: Callable[[Node], int | None]
) -> Tensor | list[Tensor] | None:
    """The numbers of the first row of a call; None where it mixes rows, or reads what has none.

    Args:
        numbers: those of its arguments, for a batch of one. batch_dim: where a tensor has its rows.
    """
    sizes = {n: 2 for n in node.all_input_nodes if _is_size(n, batch)}
    dims = {n: batch_dim(n) for n in numbers}
    if any(n not in numbers and n not in sizes for n in node.all_input_nodes) or None in dims.values():
        return None
    both: dict[Node, Any] = {n: torch.cat([t, t + _SECOND], dims[n]) for n, t in numbers.items()}  # type: ignore[arg-type]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: sizes.get(n, both.get(n)))
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError):
        return None
    if isinstance(made, Tensor):
        return _first(made, node.meta["val"], batch)
    if len(made) != len(node.meta["val"]):  # pieces of the rows: of two there are fewer
        return None
    parts = [_first(part, value, batch) for part, value in zip(made, node.meta["val"], strict=True)]
    return None if any(part is None for part in parts) else parts  # type: ignore[return-value]


def has_shape(value: Tensor, numbers: Tensor, batch: sympy.Expr, rows: int = 1) -> bool:
    """Whether the numbers have the shape of the value, but for a batch of so many rows."""
    known = [static(size) for size in value.shape]
    if known.count(None) != 1 or [rows if size is None else size for size in known] != list(numbers.shape):
        return False
    return expression(value.shape[known.index(None)]) == batch


def _first(made: Tensor, value: Tensor, batch: sympy.Expr) -> Tensor | None:
    """The first of two rows, where the second one is the same and a row apart."""
    if not has_shape(value, made, batch, rows=2):
        return None
    first, second = made.split(1, [static(size) for size in value.shape].index(None))
    apart = bool((first < _SECOND).all()) and torch.equal(first + _SECOND, second)
    return first if apart else None


def _is_size(node: Node, batch: sympy.Expr) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and expression(value) == batch
