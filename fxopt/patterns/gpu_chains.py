"""Chains of narrow linear layers on CUDA, with what is done to their columns, and which of them can share a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fxopt.kernels.mlp.plan import Op
from fxopt.kernels.mlp.serves import MOST_CHAINS, MOST_IN, MOST_OUT
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.gpu_linears import layer_at
from fxopt.patterns.groups import group
from fxopt.patterns.linear_chains import Chain
from fxopt.patterns.linear_steps import Found, step_at
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static

_ACTIVATIONS = {"": (), "relu": (Op.RELU,), "sigmoid": (Op.SIGMOID,)}


@dataclass(frozen=True)
class Member:
    """A chain that may share a launch."""

    chain: Chain

    @property
    def anchor(self) -> Node:
        return self.chain.inside[-1]

    @property
    def reads(self) -> list[Node]:
        return [*self.chain.inputs, *self.chain.state]


def find_gpu_chains(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `chains`, some with as many rows and of one dtype or one of at least two nodes, and `nodes`."""
    if not inference:
        return
    aliases, taken = Aliases(module.graph), set[Node]()
    alike: dict[object, list[Member]] = {}
    for node in module.graph.nodes:
        layer = _layer(node)
        if node in taken or not layer or (static(shape_of(node.args[1])[1]) or MOST_IN + 1) > MOST_IN:
            continue
        chain = _chain(node, layer)
        taken.update(chain.inside)
        if edited := next(filter(aliases.edited, [*chain.inputs, *chain.state, *chain.inside]), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
            continue
        value = node.meta["val"]
        alike.setdefault((expression(value.shape[0]), value.dtype, value.device), []).append(Member(chain))
    for members in alike.values():
        for together in group(module.graph, members, aliases):
            yield from _matches(together)


def _matches(together: list[Member]) -> Iterator[Match]:
    """All of a group; and each by itself, for where that is not faster."""
    for start in range(0, len(together), MOST_CHAINS):
        some = together[start : start + MOST_CHAINS]
        if len(some) > 1:
            yield _match(some)
    for member in together:
        if len(set(member.chain.inside)) > 1:
            yield _match([member])


def _match(members: list[Member]) -> Match:
    reads = [node for member in members for node in (*member.reads, *member.chain.inside)]
    bound = {"chains": [member.chain for member in members], "nodes": reads}
    return Match(min(member.anchor for member in members), bound)


def _chain(node: Node, layer: list[Found]) -> Chain:
    source: Any = node.args[0]
    chain = Chain([source])
    following: list[Found] = layer
    while following:
        for found in following:
            chain.add(found)
        following = _after(chain.inside[-1])
    return chain


def _after(node: Node) -> list[Found]:
    """What comes next, if nothing else reads what it works on."""
    step = step_at(node)
    if step is not None:
        return [step] if step.op != Op.LAYER_NORM else []
    user = next(iter(node.users), None)
    return _layer(user) if user is not None and len(node.users) == 1 and user.args[:1] == (node,) else []


def _layer(node: Node) -> list[Found]:
    """A linear layer with its activation, as steps; nothing for what is none, or too wide."""
    layer = layer_at(node)
    if layer is None or (static(shape_of(layer.weight)[0]) or 0) > MOST_OUT:
        return []
    linear = Found(Op.LINEAR, (layer.weight, layer.bias), (), [node])
    return [linear, *(Found(op, (), (), [node]) for op in _ACTIVATIONS[layer.activation])]
