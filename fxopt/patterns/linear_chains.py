"""Linear layers one after the other, with what is done to each one's rows in between, cut as a kernel takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mlp.plan import Op, Step
from fxopt.kernels.mlp.serves import LONGEST, Cut
from fxopt.patterns.core import Match, Reject, Search, is_ours
from fxopt.patterns.groups import alike
from fxopt.patterns.linear_layers import layers_at
from fxopt.patterns.linear_steps import Found, step_at
from fxopt.shape.calls import only_user
from fxopt.shape.sizes import expression, is_float32, shape_of, static
from fxopt.shape.view_operators import joined_dim

aten = torch.ops.aten
_MOST_INPUTS = 16  # of a cat that is read part by part


@dataclass
class Chain:
    """A chain as it is put together. `inside`: its nodes; all but the last have no other user."""

    inputs: list[Node]
    state: list[Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inside: list[Node] = field(default_factory=list)

    @property
    def anchor(self) -> Node:
        return self.inside[-1]

    @property
    def reads(self) -> list[Node]:
        return [*self.inputs, *self.state]

    @property
    def weights(self) -> list[Node]:
        return [self.state[step.tensors[0]] for step in self.steps if step.op == Op.LINEAR]  # type: ignore[index]

    def add(self, found: Found) -> None:
        for node in found.tensors:
            if node is not None and node not in self.state:
                self.state.append(node)
        tensors = tuple(None if node is None else self.state.index(node) for node in found.tensors)
        self.steps.append(Step(found.op, tensors, found.constants))
        self.inside += found.nodes


def find_chains(search: Search, cut: Cut = LONGEST) -> Iterator[Match | Reject]:
    """The longest chains that `cut` takes. Matches bind the `chains` of one call, and all their `nodes`."""
    if not search.inference and not cut.gradients:
        return
    chains = list[Chain]()
    for found in _chains(search, cut):
        if isinstance(found, Reject):
            yield found
        elif cut.together == 1:
            yield _match([found])
        else:
            chains.append(found)
    for together in alike(search, chains, _key):
        yield from _matches(together, cut)


def _key(chain: Chain) -> object:
    value = chain.inside[0].meta["val"]
    return expression(value.shape[0]), value.dtype, value.device


def _chains(search: Search, cut: Cut) -> Iterator[Chain | Reject]:
    taken = set[Node]()
    for node in search.graph.nodes:
        layers = None if node in taken else layers_at(node, cut)
        if isinstance(layers, str):
            yield Reject(layers, node)
            continue
        if layers is None or cut.most_in < (static(shape_of(layers.weight)[1]) or math.inf):
            continue
        before = (
            _steps_before(node) if cut.in_front and search.inference else []
        )  # a gradient goes back to a layer's input
        source: Any = before[0].nodes[0].args[0] if before else layers.x
        chain = _chain(_inputs(source) if cut.in_front else [source], [*before, *layers.steps], cut)
        taken.update(chain.inside)
        if cut.together == 1 and len(set(chain.inside)) < cut.fewest:
            continue
        inside = chain.inside if cut.device == "cuda" else chain.inside[:-1]  # launches are moved, edits are not
        if edited := next(filter(search.aliases.edited, [*chain.reads, *inside]), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
        else:
            yield chain


def _matches(together: list[Chain], cut: Cut) -> Iterator[Match]:
    """All of a group, as many as a call takes; and each by itself, for where that is not faster."""
    for start in range(0, len(together), cut.together):
        some = together[start : start + cut.together]
        if len(some) > 1:
            yield _match(some)
    for chain in together:
        if len(set(chain.inside)) >= cut.fewest:
            yield _match([chain])


def _match(chains: list[Chain]) -> Match:
    nodes = [node for chain in chains for node in (*chain.reads, *chain.inside)]
    return Match(min(chain.anchor for chain in chains), {"chains": chains, "nodes": nodes})


def _chain(inputs: list[Node], steps: list[Found], cut: Cut) -> Chain:
    """A chain that begins with these steps, as long as `cut` lets it become."""
    chain = Chain(inputs)
    while steps:
        for found in steps:
            chain.add(found)
        steps = _behind(chain.anchor, cut)
        if len(chain.weights) + sum(found.op == Op.LINEAR for found in steps) > cut.most_layers:
            break
    return chain


def _behind(node: Node, cut: Cut) -> list[Found]:
    """What comes next, if nothing else reads what it works on."""
    step = step_at(node)
    if step is not None:
        return [step] if step.op in cut.between else []
    user = only_user(node)
    if user is not None and is_ours(user, "fxopt::mlp_chains"):
        user = only_user(user)
    layers = layers_at(user, cut) if user is not None else None
    if layers is None or isinstance(layers, str) or layers.x is not node or node in layers.steps[0].tensors:
        return []
    return layers.steps


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


def _inputs(source: Node) -> list[Node]:
    """The parts of a cat along the last dim that nobody else reads; else the source itself."""
    if source.target is not aten.cat.default or len(source.users) != 1:
        return [source]
    parts: Any = source.args[0]
    rank = len(shape_of(source))
    if joined_dim(source) != rank - 1 or not 1 < len(parts) <= _MOST_INPUTS:
        return [source]
    return list(parts) if all(is_float32(part, rank=rank) for part in parts) else [source]
