"""Value ranges: what every element of a tensor can be, for every input, by the program that computes it.

As in RECom (Pan et al., ASPLOS 2023), but checked against eager at each dtype's extremes: what may overflow, wrap or be
undefined is everything its dtype holds.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import packet_of
from fxopt.shape.ranges.algebra import size_values
from fxopt.shape.ranges.operation import Known, Operation, Rule
from fxopt.shape.ranges.rules import ELEMENTWISE, RULES
from fxopt.shape.ranges.rules_movement import MOVES
from fxopt.shape.ranges.values import Values
from fxopt.shape.sizes import tensor_of


class Ranges:
    """Value ranges of one graph, worked out when asked for and remembered."""

    def __init__(self, graph: Graph, aliases: Aliases | None = None) -> None:
        self.aliases = aliases or Aliases(graph)
        self._seen: dict[Node, Known] = {}

    def of(self, node: Node) -> Known:
        """What every element of a tensor (or the number, of a size) can be."""
        if node not in self._seen:
            for other in _unseen_inputs(node, self._seen):  # deep graphs: no recursion
                self._seen[other] = self._work_out(other)
        return self._seen[node]

    def condition(self, node: Node) -> bool | None:
        """True, or False, where a bool tensor is that in every element for every input; why: of(node).because."""
        tensor, number = tensor_of(node), self.of(node).values.number
        return bool(number) if tensor is not None and tensor.dtype == torch.bool and number is not None else None

    def of_value(self, value: object) -> Known:
        """Of an argument: a node or a Python number."""
        if isinstance(value, Node):
            return self.of(value)
        if isinstance(value, bool):
            return Known(Values.only(int(value)), "")
        if isinstance(value, int | float):
            return Known(Values.only(value), "")
        return Known(Values.of_dtype(torch.float64), "")

    def elementwise(self, node: Node) -> Rule | None:
        """The rule of a node whose elements depend on those of its arguments at their position."""
        return ELEMENTWISE.get(packet_of(node)) if node.op == "call_function" else None

    def moves(self, node: Node) -> bool:
        """Whether a node only moves the elements of its first argument."""
        return packet_of(node) in MOVES and node.target is not torch.ops.aten.view.dtype

    def _work_out(self, node: Node) -> Known:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            anything = Known(Values.of_dtype(value.dtype), f"any {str(value.dtype).removeprefix('torch.')}")
        elif isinstance(value, torch.SymInt | int):
            anything = Known(size_values(value), "a size")
        else:
            anything = Known(Values.of_dtype(torch.float64), "any number")
        rule = rule_of(node) if value is not None and not isinstance(value, list | tuple) else None
        if rule is None or _is_complex(node) or self.aliases.edited(node):
            return anything
        found = rule(Operation(self, node))
        if found is None:
            return anything
        values = found.values & anything.values
        return anything if values == anything.values else Known(values, found.because)


def rule_of(node: Node) -> Rule | None:
    """By the operator, or by one overload of it."""
    if node.op != "call_function":
        return RULES.get(node.op)
    return RULES.get(node.target) or RULES.get(packet_of(node))


def _is_complex(node: Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def _unseen_inputs(node: Node, seen: dict[Node, Known]) -> list[Node]:
    """`node` and what it is computed from, inputs first, less what is seen."""
    order: list[Node] = []
    stack: list[Node] = [node]
    entered: set[Node] = set()
    while stack:
        top = stack[-1]
        if top in entered:
            stack.pop()
            continue
        read = top.all_input_nodes if rule_of(top) else ()  # what has no rule asks for nothing
        waiting = [i for i in read if i not in entered and i not in seen]
        if waiting:
            stack.extend(waiting)
        else:
            entered.add(top)
            order.append(top)
            stack.pop()
    return order
