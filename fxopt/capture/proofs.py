"""What value ranges prove while a trace runs: a number that depends on no input needs no data."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.value_ranges import ValueRanges

from fxopt.shape.aliases import Aliases, mutates
from fxopt.shape.ranges.analysis import Ranges
from fxopt.shape.ranges.values import Values
from fxopt.shape.sizes import static

ITEMS = frozenset({torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default})


class Proofs:
    """Value ranges of a graph that grows."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._last: Node | None = None
        self._aliases = Aliases()
        self._ranges = Ranges(tracer.graph, self._aliases)

    def number(self, tensor: torch.Tensor) -> bool | int | float | None:
        """The one number that a tensor of one element holds for every input; None where it depends on them."""
        values = self._values(tensor) if all(static(size) == 1 for size in tensor.shape) else None
        number = None if values is None else values.number
        if number is None or tensor.dtype.is_floating_point:
            return number or None  # a float zero may be minus zero
        return bool(number) if tensor.dtype == torch.bool else number

    def bound(self, number: torch.SymInt, tensor: torch.Tensor) -> None:
        """Tell the shape environment the range of `number`, which is the element of `tensor`."""
        values, shape_env = self._values(tensor), number.node.shape_env
        if (
            values is None
            or not values.intervals
            or not number.node.expr.is_Symbol
            or not isinstance(shape_env, ShapeEnv)
        ):
            return
        known = shape_env.var_to_range[number.node.expr]
        shape_env.var_to_range[number.node.expr] = known & ValueRanges(int(values.min), int(values.max))

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        slot = proxy_tensor.get_proxy_slot(tensor, self._tracer, None)  # type: ignore[call-overload]
        return None if slot is None else slot.proxy.node

    def _values(self, tensor: torch.Tensor) -> Values | None:
        node = self.node_of(tensor)
        if node is None:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # asking is not to be traced
            self._follow(node.graph)
            return self._ranges.of(node).values

    def _follow(self, graph: Graph) -> None:
        """Take in what was traced since; an edit in place makes what was known before it void."""
        node = graph._root if self._last is None else self._last
        while (node := node.next) is not graph._root:
            self._aliases.add(node)
            self._last = node
            if mutates(node):
                self._ranges = Ranges(graph, self._aliases)
