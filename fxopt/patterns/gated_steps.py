"""Activations that read their input more than once: x * sigmoid(x), and Dice, however their sums are written.

Each value is followed as a polynomial in x, p (the sigmoid) and a (the slopes): alpha * (1 - p) * x + p * x and
x * (p + alpha - alpha * p) are the same one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxopt.shape.sizes import tensor_of

aten = torch.ops.aten
Polynomial = dict[tuple[str, ...], float]  # the factor of each product, by its sorted letters

_SILU: Polynomial = {("p", "x"): 1}
_DICE: Polynomial = {("a", "x"): 1, ("a", "p", "x"): -1, ("p", "x"): 1}
_MOST_NODES = 12


@dataclass
class Gate:
    """What was found between `source` and the last of `nodes`. norm: what the sigmoid is of; slopes: a."""

    nodes: list[Node]
    is_dice: bool
    norm: Node | None
    slopes: Node | None


def gate_at(source: Node) -> Gate | None:
    """The gate that all users of `source` belong to, if nothing inside it is read elsewhere."""
    reading = _Reading({source: {("x",): 1}})
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
    values: dict[Node, Polynomial]
    letters: dict[str, Node] = field(default_factory=dict)

    def gate(self, polynomial: Polynomial) -> Gate | None:
        nodes = list(self.values)[1:]
        norm, slopes = self.letters.get("z"), self.letters.get("a")
        if polynomial == _SILU and norm is None:
            return Gate(nodes, False, None, None)
        return Gate(nodes, True, norm, slopes) if polynomial == _DICE and norm is not None else None

    def polynomial(self, node: Node) -> Polynomial | None:
        if node.op != "call_function" or tensor_of(node) is None:
            return None
        if node.target is aten.batch_norm.default:
            return self._letter("z", node) if self._operand(node.args[0]) == {("x",): 1} else None
        if node.target is aten.sigmoid.default:
            argument = self._operand(node.args[0])
            is_gate = argument == {("z",): 1} or (argument == {("x",): 1} and "z" not in self.letters)
            return self._letter("p", node) if is_gate else None
        operands = [self._operand(argument) for argument in node.args]
        if None in operands or node.kwargs:
            return None
        return _combined(node.target, operands)  # type: ignore[arg-type]

    def _operand(self, argument: Any) -> Polynomial | None:
        if isinstance(argument, int | float):
            return {(): float(argument)}
        if argument in self.values:
            return self.values[argument]
        return self._letter("a", argument) if isinstance(argument, Node) else None

    def _letter(self, letter: str, node: Node) -> Polynomial | None:
        """One node for each letter."""
        return {(letter,): 1} if self.letters.setdefault(letter, node) is node else None


def _combined(target: Any, operands: list[Polynomial]) -> Polynomial | None:
    if target is aten.neg.default:
        return _product({(): -1}, operands[0])
    if len(operands) > 2 and operands[2] != {(): 1}:  # alpha
        return None
    if target is aten.mul.Tensor:
        return _product(operands[0], operands[1])
    if target is aten.add.Tensor:
        return _sum(operands[0], operands[1])
    if target is aten.sub.Tensor:
        return _sum(operands[0], _product({(): -1}, operands[1]))
    if target in (aten.rsub.Scalar, aten.rsub.Tensor):
        return _sum(operands[1], _product({(): -1}, operands[0]))
    return None


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    total = Counter(left)
    for letters, factor in right.items():
        total[letters] += factor  # type: ignore[assignment]
    return {letters: factor for letters, factor in total.items() if factor}


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    products: Polynomial = {}
    for letters, factor in left.items():
        for others, other in right.items():
            products = _sum(products, {tuple(sorted(letters + others)): factor * other})
    return products
