"""Activations that read their input more than once: x * sigmoid(x), and Dice, however their sums are written.

Each value is followed as a polynomial in x, p (the sigmoid) and a (the slopes): alpha * (1 - p) * x + p * x and
x * (p + alpha - alpha * p) are the same one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxopt.shape.sizes import tensor_of

aten = torch.ops.aten
_X, _P, _A, _Z = sympy.symbols("x p a z")
_SILU = _X * _P
_DICE = sympy.expand(_A * (1 - _P) * _X + _P * _X)
_MOST_NODES = 12
_ARITHMETIC: dict[Any, Callable[..., sympy.Expr]] = {
    aten.neg.default: operator.neg,
    aten.mul.Tensor: operator.mul,
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    **dict.fromkeys((aten.rsub.Scalar, aten.rsub.Tensor), lambda left, right: right - left),
}


@dataclass
class Gate:
    """What was found between `source` and the last of `nodes`. norm: what the sigmoid is of; slopes: a."""

    nodes: list[Node]
    is_dice: bool
    norm: Node | None
    slopes: Node | None


def gate_at(source: Node) -> Gate | None:
    """The gate that all users of `source` belong to, if nothing inside it is read elsewhere."""
    reading = _Reading({source: _X})
    pending = set(source.users)
    while pending and len(reading.values) <= _MOST_NODES:
        node = min(pending)
        pending.remove(node)
        polynomial = reading.polynomial(node)
        if polynomial is None:
            return None
        reading.values[node] = polynomial
        if not pending and (found := reading.gate(polynomial)):
            return found
        pending |= node.users.keys() - reading.values.keys()
    return None


@dataclass
class _Reading:
    values: dict[Node, sympy.Expr]
    letters: dict[sympy.Symbol, Node] = field(default_factory=dict)

    def gate(self, polynomial: sympy.Expr) -> Gate | None:
        nodes = list(self.values)[1:]
        norm, slopes = self.letters.get(_Z), self.letters.get(_A)
        if polynomial == _SILU and norm is None:
            return Gate(nodes, False, None, None)
        return Gate(nodes, True, norm, slopes) if polynomial == _DICE and norm is not None else None

    def polynomial(self, node: Node) -> sympy.Expr | None:
        if node.op != "call_function" or tensor_of(node) is None:
            return None
        if node.target is aten.batch_norm.default:
            return self._letter(_Z, node) if self._operand(node.args[0]) == _X else None
        if node.target is aten.sigmoid.default:
            argument = self._operand(node.args[0])
            is_gate = argument == _Z or (argument == _X and _Z not in self.letters)
            return self._letter(_P, node) if is_gate else None
        operands = [self._operand(argument) for argument in node.args]
        if None in operands or node.kwargs:
            return None
        return _combined(node.target, operands)  # type: ignore[arg-type]

    def _operand(self, argument: Any) -> sympy.Expr | None:
        if isinstance(argument, int | float):
            return sympy.Rational(float(argument)) if math.isfinite(argument) else None
        if argument in self.values:
            return self.values[argument]
        return self._letter(_A, argument) if isinstance(argument, Node) else None

    def _letter(self, letter: sympy.Symbol, node: Node) -> sympy.Symbol | None:
        """One node for each letter."""
        return letter if self.letters.setdefault(letter, node) is node else None


def _combined(target: Any, operands: list[sympy.Expr]) -> sympy.Expr | None:
    if target not in _ARITHMETIC or operands[2:] not in ([], [1]):  # alpha
        return None
    return sympy.expand(_ARITHMETIC[target](*operands[:2]))
