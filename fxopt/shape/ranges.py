"""Value ranges: what every element of a tensor can be, for every input, by the program that computes it.

As in RECom (Pan et al., ASPLOS 2023), but checked against eager at each dtype's extremes: what may overflow, wrap or be
undefined is everything its dtype holds.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fxopt.shape.aliases import Aliases
from fxopt.shape.range_operation import Known, Operation
from fxopt.shape.range_rules import RULES
from fxopt.shape.values import Values


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
        values = self.of(node).values
        return bool(values.min) if len(values.intervals) == 1 and values.min == values.max else None

    def of_value(self, value: object) -> Known:
        """Of an argument: a node or a Python number."""
        if isinstance(value, Node):
            return self.of(value)
        if isinstance(value, bool):
            return Known(Values.only(int(value)), "")
        if isinstance(value, int | float):
            return Known(Values.only(value), "")
        return Known(Values.of_dtype(torch.float64), "")

    def _work_out(self, node: Node) -> Known:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            anything = Known(Values.of_dtype(value.dtype), f"any {str(value.dtype).removeprefix('torch.')}")
            if self.aliases.edited(node):
                return anything
        else:
            anything = Known(Values.of_dtype(torch.float64), "")
        rule = RULES.get(node.target if node.op == "call_function" else node.op)
        found = rule(Operation(self, node)) if rule else None
        if found is None or (not found.values.within(anything.values)):
            return anything
        return anything if found.values == anything.values else found


def _unseen_inputs(node: Node, seen: dict[Node, Known]) -> list[Node]:
    """`node` and what it is computed from, inputs first, less what is seen."""
    order: list[Node] = []
    stack, entered = [node], set(seen)
    while stack:
        top = stack[-1]
        if top in entered:
            stack.pop()
            continue
        waiting = [i for i in top.all_input_nodes if i not in entered]
        if waiting:
            stack.extend(waiting)
        else:
            entered.add(top)
            order.append(top)
            stack.pop()
    return order
