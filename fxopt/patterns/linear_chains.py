"""Linear layers one after the other, with what is done to each one's rows in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.mlp.plan import Op, Step
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.linear_steps import Found, step_at
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import same, shape_of, static, tensor_of

aten = torch.ops.aten
_MOST_INPUTS = 16  # of a cat that is read part by part


@dataclass
class Chain:
    """A chain as it is put together. `inside`: its nodes; all but the last have no other user."""

    inputs: list[Node]
    state: list[Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inside: list[Node] = field(default_factory=list)

    def add(self, found: Found) -> None:
        for node in found.tensors:
            if node is not None and node not in self.state:
                self.state.append(node)
        tensors = tuple(None if node is None else self.state.index(node) for node in found.tensors)
        self.steps.append(Step(found.op, tensors, found.constants))
        self.inside += found.nodes


def find_chains(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """The longest chains that begin with a linear layer, or with what is done to its input alone."""
    aliases = Aliases(module.graph)
    taken = set[Node]()
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if node in taken:
            continue
        first = linear_at(node)
        if isinstance(first, str):
            yield Reject(first, node)
            continue
        chain = _chain(node, first, inference)
        taken.update(chain.inside)
        if edited := next(filter(aliases.edited, [*chain.inputs, *chain.state, *chain.inside[:-1]]), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
            continue
        bound: dict[str, Any] = {"inputs": chain.inputs, "state": chain.state, "steps": chain.steps}
        yield Match(chain.inside[-1], bound)


def linear_at(node: Node) -> Found | str:
    """The step of a linear layer, or why it is none."""
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    value, rows = tensor_of(weight), tensor_of(x)  # type: ignore[arg-type]
    if not isinstance(weight, Node) or value is None or rows is None:
        return "its weight is not a tensor"
    if value.dtype != torch.float32 or value.device.type != "cpu" or rows.dtype != torch.float32:
        return f"expected float32 on the CPU, found {value.dtype} on {value.device.type}"
    if value.dim() != 2:
        return f"expected a matrix as its weight, found {value.dim()} dims"
    if not any(static(size) == 1 or same(stride, 1) for size, stride in zip(value.shape, value.stride(), strict=True)):
        return "neither the rows nor the columns of its weight are dense"
    return Found(Op.LINEAR, (weight, bias if isinstance(bias, Node) else None), (), [node])


def _chain(node: Node, first: Found, inference: bool) -> Chain:
    before = _steps_before(node) if inference else []  # a gradient goes back to a linear layer's input
    source: Any = before[0].nodes[0].args[0] if before else node.args[0]
    chain = Chain(_inputs(source))
    for found in (*before, first):
        chain.add(found)
    while found_after := _after(chain.inside[-1]):
        chain.add(found_after)
    return chain


def _steps_before(linear: Node) -> list[Found]:
    """What is done to the input of a linear layer, where nobody else reads it."""
    steps: list[Found] = []
    node: Any = linear.args[0]
    while isinstance(node, Node) and len(node.users) == 1 and node.args and isinstance(node.args[0], Node):
        source = node.args[0]
        found = step_at(source)
        if found is None or found.nodes != [node]:
            break
        steps.insert(0, found)
        node = source
    return steps


def _after(node: Node) -> Found | None:
    """The next step, if nothing else reads what it works on."""
    found = step_at(node)
    if found is not None:
        return found
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or user.target is not aten.linear.default or user.args[0] is not node:
        return None
    linear = linear_at(user)
    return None if isinstance(linear, str) or user.args[1] is node else linear


def _inputs(source: Node) -> list[Node]:
    """The parts of a cat along the last dim that nobody else reads; else the source itself."""
    if source.target is not aten.cat.default or len(source.users) != 1:
        return [source]
    parts: Any = source.args[0]
    dim = source.args[1] if len(source.args) > 1 else 0
    values = [tensor_of(part) for part in parts]
    rank = len(shape_of(source))
    if dim not in (-1, rank - 1) or not 1 < len(parts) <= _MOST_INPUTS:
        return [source]
    fits = all(value is not None and value.dtype == torch.float32 and value.dim() == rank for value in values)
    return list(parts) if fits else [source]
