"""Which columns of which step every tensor of a graph holds.

A tensor that has the batch as one of its dims is an int64 tensor of the numbers of its columns, of the same shape but
for a batch of one. Torch's own operators then move the numbers as they would the values (moved.py), so a view, a concat
or a stack means what it means in any spelling; products of columns that are summed up are mixtures of experts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxopt.kernels.towers.plan import Activation
from fxopt.patterns.linear_layers import sizes_fit
from fxopt.patterns.towers import products
from fxopt.patterns.towers.moved import has_shape, moved
from fxopt.patterns.towers.steps import InputStep, LinearStep, SoftmaxStep, Steps
from fxopt.patterns.towers.terms import Terms, computed
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, is_float32, shape_of, static, tensor_of
from fxopt.shape.view_operators import VIEWS

aten = torch.ops.aten
ACTIVATIONS: dict[Any, Activation] = {
    aten.relu.default: "relu", aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh",
}  # fmt: skip
JOINS = {aten.cat.default, aten.stack.default}
_MOST_ROWS = 8  # linears that stand for one on [B, F, K]
_MOST_COLUMNS = 1 << 15
Value = Tensor | Terms | list[Any]


class Columns:
    """values: of the nodes that a call on rows of `batch` could compute; `inputs`: of those that it would read."""

    def __init__(self, graph: Graph, aliases: Aliases, batch: sympy.Expr) -> None:
        self.steps, self.batch, self._aliases = Steps(), batch, aliases
        self.values: dict[Node, Value] = {}
        self.inputs: dict[Node, Tensor | None] = {}
        self._computed: dict[Node, Tensor | None] = {}
        self._parts: dict[Node, Value | None] = {}
        for node in graph.nodes:
            value = self._value(node) if node.op == "call_function" and not aliases.edited(node) else None
            if value is not None:
                self.values[node] = value

    def numbers_in(self, node: Node) -> Tensor | None:
        """Columns of steps that a call can compute; nothing of a softmax."""
        if node not in self._computed:
            value = self.values.get(node)
            value = computed(value, self.steps) if isinstance(value, Terms) else value
            self._computed[node] = value if isinstance(value, Tensor) and not self.is_soft(value) else None
        return self._computed[node]

    def numbers(self, node: Node) -> Tensor | None:
        """What a step would read: columns of other steps, or of an input."""
        if (numbers := self.numbers_in(node)) is not None:
            return numbers
        if node not in self.inputs:
            self.inputs[node] = self._input(node)
        return self.inputs[node]

    def is_soft(self, numbers: Tensor) -> bool:
        return any(isinstance(self.steps[run.step], SoftmaxStep) for run in self.steps.runs(numbers))

    def _input(self, node: Node) -> Tensor | None:
        """Columns of a tensor from outside, through views of it."""
        if not is_float32(node, "cpu") or self._aliases.edited(node):
            return None
        moved = self._view(node)
        if isinstance(moved, Tensor) and self._lies_in_one_row(moved):
            return moved
        sizes = [static(size) for size in shape_of(node)]
        if not 2 <= len(sizes) <= 3 or sizes[0] is not None or None in sizes[1:] or self.batch_dim(node) != 0:
            return None
        columns = torch.Size(sizes[1:]).numel()  # type: ignore[arg-type]
        if not 0 < columns <= _MOST_COLUMNS:
            return None
        inner = sizes[1] if len(sizes) == 3 else 0
        return self.steps.numbers(InputStep(node, inner or 0)).reshape(1, *sizes[1:])  # type: ignore[arg-type]

    def _view(self, node: Node) -> Value | None:
        """The numbers of a view, or of the parts of a split, of an input."""
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or source in self.values:
            return None
        if node.target is operator.getitem and source.target in VIEWS:
            if source not in self._parts:
                self._parts[source] = self._view(source)
            parts = self._parts[source]
            return parts[node.args[1]] if isinstance(parts, list) else None  # type: ignore[index]
        whole = self.numbers(source) if node.target in VIEWS and tensor_of(source) is not None else None
        return self._moved(node, {source: whole}) if whole is not None else None

    def _lies_in_one_row(self, numbers: Tensor) -> bool:
        """Whether a step can read them where they are: side by side, in one of the input's inner rows."""
        runs = self.steps.runs(numbers)
        return len(runs) == 1 and isinstance(self.steps[runs[0].step], InputStep)

    def batch_dim(self, node: Node) -> int | None:
        """The one dim that is the batch; None where another one depends on it, or none is."""
        found = None
        for dim, size in enumerate(shape_of(node)):
            if static(size) is not None:
                continue
            if found is not None or expression(size) != self.batch:
                return None
            found = dim
        return found

    def _value(self, node: Node) -> Value | None:
        if node.target is aten.linear.default:
            return self._linear(node)
        known = [argument for argument in node.all_input_nodes if argument in self.values]
        if not known:
            return None
        if node.target is operator.getitem:
            pieces, index = self.values[known[0]], node.args[1]
            return pieces[index] if isinstance(pieces, list) and isinstance(index, int) else None
        if node.target in VIEWS or node.target in JOINS:
            return self._moved(node, {n: self.values.get(n, self.read(n)) for n in node.all_input_nodes})
        handler = _HANDLERS.get(node.target)
        if handler is None or not is_float32(node) or self.batch_dim(node) is None:
            return None
        return handler(self, node)

    def read(self, node: Node) -> Value | None:
        """The numbers of an operand that this graph does not compute."""
        return None if tensor_of(node) is None else self.numbers(node)

    def _moved(self, node: Node, sources: dict[Node, Any]) -> Value | None:
        """A view, concat or stack, of numbers or of both factors of terms."""
        sources = {n: source for n, source in sources.items() if tensor_of(n) is not None}
        if any(source is None or isinstance(source, list) for source in sources.values()):
            return None
        terms = [source for source in sources.values() if isinstance(source, Terms)]
        if not terms:
            return self._run(node, sources)
        count, *others = {source.left.shape[-1] if isinstance(source, Terms) else 0 for source in sources.values()}
        if others:
            return None
        sides = []
        for side in ("left", "right"):
            moved = [
                self._run(node, {n: getattr(source, side)[..., term] for n, source in sources.items()})
                for term in range(count)
            ]
            if not all(isinstance(m, Tensor) for m in moved):
                return None
            sides.append(torch.stack(moved, -1))  # type: ignore[arg-type]
        return Terms(*sides)

    def has_shape(self, node: Node, numbers: Tensor) -> bool:
        return has_shape(node.meta["val"], numbers, self.batch)

    def _run(self, node: Node, numbers: dict[Node, Tensor]) -> Tensor | list[Tensor] | None:
        return moved(node, numbers, self.batch, self.batch_dim)

    def _linear(self, node: Node) -> Tensor | None:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
        if not isinstance(x, Node) or not isinstance(weight, Node) or not self._is_matrix(weight):
            return None
        if bias is not None and (not isinstance(bias, Node) or not sizes_fit(node) or not self._is_plain(bias, 1)):
            return None
        batch, rank = self.batch_dim(node), len(shape_of(node))
        if batch is None or batch == rank - 1 or not is_float32(node):
            return None
        numbers = self.numbers(x)
        N, K = (static(size) or 0 for size in shape_of(weight))
        if numbers is None or numbers.numel() > _MOST_ROWS * K:
            return None
        rows = [LinearStep(self.steps.runs(row), weight, bias, N) for row in numbers.reshape(-1, K)]
        return torch.stack([self.steps.numbers(step) for step in rows]).reshape(*numbers.shape[:-1], N)

    def _is_matrix(self, weight: Node) -> bool:
        return self._is_plain(weight, 2) and weight.meta["val"].stride()[-1] == 1

    def _is_plain(self, node: Node, rank: int) -> bool:
        if not is_float32(node, "cpu", rank):
            return False
        sizes = [static(size) for size in shape_of(node)]
        return None not in sizes and 0 not in sizes and not self._aliases.edited(node)

    def _activation(self, node: Node) -> Tensor | None:
        """Of columns of linears: linears with the activation."""
        numbers = self.numbers(node.all_input_nodes[0])
        if numbers is None:
            return None
        made = torch.empty_like(numbers).flatten()
        at = 0
        for run in self.steps.runs(numbers):
            step = self.steps[run.step]
            if not isinstance(step, LinearStep) or step.activation != "none":
                return None
            active = LinearStep(step.x, step.weight, step.bias, step.width, ACTIVATIONS[node.target])
            made[at : at + run.width] = self.steps.numbers(active)[run.column : run.column + run.width]
            at += run.width
        return made.reshape(numbers.shape)

    def _softmax(self, node: Node) -> Tensor | None:
        numbers = self.numbers(node.all_input_nodes[0])
        named: Any = node.args[1]
        dim = named % len(shape_of(node))
        if numbers is None or dim == self.batch_dim(node):
            return None
        last = numbers.movedim(dim, -1)
        rows = [self.steps.numbers(SoftmaxStep(self.steps.runs(row))) for row in last.reshape(-1, last.shape[-1])]
        return torch.stack(rows).reshape(last.shape).movedim(-1, dim)


_HANDLERS: dict[Any, Callable[[Columns, Node], Value | None]] = {
    **dict.fromkeys(ACTIVATIONS, Columns._activation),
    **products.HANDLERS,
    aten.softmax.int: Columns._softmax,
}
