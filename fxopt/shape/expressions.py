"""Size expressions of a graph: which ones its inputs have, and how to compute the others from those.

RECom's ShapeConstruct idea (ASPLOS 2023): a size belongs to the inputs, not to the tensor that a model happens to ask.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from fxopt.shape.sizes import expression, static, tensor_of

T = TypeVar("T")

_OPERATORS: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    Max: torch.sym_max,
    Min: torch.sym_min,
}


class Sources:
    """Where each size of a graph's inputs is read: a placeholder that something else uses too, where there is one."""

    def __init__(self, graph: Graph) -> None:
        self._read: dict[sympy.Expr, tuple[Node, int]] = {}
        inputs = [node for node in graph.find_nodes(op="placeholder") if tensor_of(node) is not None]
        for node in sorted(inputs, key=lambda node: not _is_live(node)):
            for dim, size in enumerate(node.meta["val"].shape):
                if static(size) is None:
                    self._read.setdefault(expression(size), (node, dim))
        self._known = dict.fromkeys(self._read, True)

    def get(self, expr: sympy.Expr) -> tuple[Node, int] | None:
        """(placeholder, dim) that has this very size."""
        return self._read.get(expr)

    def has(self, expr: sympy.Expr) -> bool:
        """Whether an expression can be computed from the inputs; what depends on data (u0) cannot."""
        if expr not in self._known:
            self._known[expr] = bool(expr.is_Integer) or (bool(expr.args) and all(map(self.has, operands(expr))))
        return self._known[expr]


def _is_live(node: Node) -> bool:
    return any(not is_size(user) for user in node.users)


def operands(expr: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """What `_OPERATORS` combine to this expression; a symbol itself where they cannot."""
    if expr.func in _OPERATORS:
        return expr.args
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return (expr.base,) * int(expr.exp)
    return (sympy.Symbol("unknown"),)


class Computed(Generic[T]):
    """Size expressions as values of some kind, each distinct one once.

    Args:
        sources: of the graph; every expression asked for must be in it.
        read: makes the value of (placeholder, dim); call: that of (operator, left, right).
        known: expressions that have a value already.
    """

    def __init__(
        self,
        sources: Sources,
        read: Callable[[Node, int], T],
        call: Callable[..., T],
        known: dict[sympy.Expr, T] | None = None,
    ) -> None:
        self.known = {} if known is None else known
        self._sources, self._read, self._call = sources, read, call

    def of(self, expr: sympy.Expr) -> T | int:
        if expr.is_Integer:
            return int(expr)
        if expr not in self.known:
            self.known[expr] = self._made(expr)
        return self.known[expr]

    def _made(self, expr: sympy.Expr) -> T:
        place = self._sources.get(expr)
        if place is not None:
            return self._read(*place)
        combine = functools.partial(self._call, _OPERATORS.get(expr.func, operator.mul))
        return functools.reduce(combine, map(self.of, operands(expr)))  # type: ignore[arg-type, return-value]


def is_size(node: Node) -> bool:
    """Whether a node is a size, or a number that was computed from sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def header(graph: Graph) -> tuple[list[Node], Node]:
    """The sizes at the top of a graph, computed from inputs alone, and the first node behind them."""
    sizes = []
    for node in graph.nodes:
        if node.op == "call_function" and is_size(node):
            sizes.append(node)
        elif node.op != "placeholder":
            break
    return sizes, node


def sizes_in(graph: Graph) -> Iterator[Node]:
    """The calls of a graph that give a size."""
    return (node for node in graph.nodes if node.op == "call_function" and is_size(node))
