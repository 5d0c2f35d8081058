"""What value ranges prove while a trace runs: a number that depends on no input needs no data."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fxopt.capture.constants import Constants
from fxopt.shape.aliases import Aliases, mutates
from fxopt.shape.ranges.analysis import Ranges
from fxopt.shape.ranges.values import Values
from fxopt.shape.sizes import static
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.modes import no_dispatch_modes, no_function_modes
from fxopt.torch_internals.symbols import narrow
from fxopt.torch_internals.tracing import nodes_behind, proxy_of

ITEMS = frozenset({torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default})


class Proofs:
    """Value ranges of a graph that grows."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._last: Node | None = None
        self._aliases = Aliases()
        self._ranges = Ranges(tracer.graph, self._aliases)
        self._constants = Constants(tracer, self._aliases)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A small tensor that is the same for every input, with its numbers; None for any other."""
        with no_function_modes(), no_dispatch_modes():
            self._follow(self._tracer.graph)
            if not isinstance(tensor, FakeTensor):
                return self._constants.of_own(tensor)
            node = self.node_of(tensor)
            return None if node is None else self._constants.of(node)

    def number(self, tensor: torch.Tensor) -> bool | int | float | None:
        """The one number that a tensor of one element holds for every input; None where it depends on them."""
        values = self._values(tensor) if all(static(size) == 1 for size in tensor.shape) else None
        number = None if values is None else values.number
        if number is None or tensor.dtype.is_floating_point:
            return number or None  # a float zero may be minus zero
        return bool(number) if tensor.dtype == torch.bool else number

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether Python may ask for its one number."""
        return self.number(tensor) is not None or self.constant(tensor) is not None

    def are_among(self, tensor: torch.Tensor, *numbers: float) -> bool:
        """Whether a tensor holds none but these numbers for every input."""
        values = self._values(tensor)
        return values is not None and values.within(Values.only(*numbers))

    def bound(self, number: torch.SymInt, tensor: torch.Tensor) -> None:
        """Tell the shape environment the range of `number`, which is the element of `tensor`."""
        values = self._values(tensor)
        if values is not None and values.intervals:
            narrow(number, int(values.min), int(values.max))

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        proxy = proxy_of(tensor, self._tracer)
        return None if proxy is None else proxy.node

    def edits_of(self, node: Node) -> list[Node]:
        """What has written to its memory so far."""
        self._follow(node.graph)
        return self._aliases.edits(node)

    def _values(self, tensor: torch.Tensor) -> Values | None:
        node = self.node_of(tensor)
        if node is None:
            return None
        with no_function_modes(), no_dispatch_modes():  # asking is not to be traced
            self._follow(node.graph)
            return self._ranges.of(node).values

    def _follow(self, graph: Graph) -> None:
        """Take in what was traced since; an edit in place makes what was known before it void."""
        for node in nodes_behind(self._last, graph):
            self._aliases.add(node)
            self._last = node
            if mutates(node):
                self._ranges = Ranges(graph, self._aliases)
