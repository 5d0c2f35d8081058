"""Linear layers on CUDA one behind the other, which a single launch can serve while rows are few."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.mlp.plan import Op, split
from fxopt.kernels.mlp.serves import MOST_LAYERS, VECTOR
from fxopt.patterns.core import Match, Reject, is_ours
from fxopt.patterns.gpu_linears import Layer, layer_at
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import shape_of, static, tensor_of

_ACTIVATIONS = {Op.RELU: "relu", Op.SIGMOID: "sigmoid"}


def find_gpu_few_rows(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers` (Layer), from two up, each read by the next one alone, and all their `nodes`."""
    if not inference:
        return
    aliases, taken = Aliases(module.graph), set[Node]()
    for node in module.graph.nodes:
        layers = [] if node in taken else _layers(node)
        while layers and (following := _following(layers[-1])) and len(layers) + len(following) <= MOST_LAYERS:
            layers += following
        taken.update(layer.anchor for layer in layers)
        if len({layer.anchor for layer in layers}) < 2:
            continue
        nodes = [node for layer in layers for node in (layer.anchor, *layer.reads)]
        if edited := next(filter(aliases.edited, nodes), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
        else:
            yield Match(layers[-1].anchor, {"layers": layers, "nodes": nodes})


def _following(layer: Layer) -> list[Layer]:
    user = _only(layer.anchor)
    if user is not None and is_ours(user, "fxopt::mlp_chains"):
        user = _only(user)
    following = _layers(user) if user is not None else []
    return following if following and following[0].x is layer.anchor else []


def _only(node: Node) -> Node | None:
    """The one that reads it alone."""
    (user, *others) = node.users or (None,)
    return None if others else user


def _layers(node: Node) -> list[Layer]:
    """What a node computes, as layers that the kernel knows."""
    layer = layer_at(node)
    layers = [layer] if layer is not None else _of_chain(node)
    value = tensor_of(node)
    if value is None or value.dtype != torch.float32:
        return []
    return layers if all((static(shape_of(layer.weight)[1]) or 1) % VECTOR == 0 for layer in layers) else []


def _of_chain(node: Node) -> list[Layer]:
    """Those of a chain that has a launch of its own, all with its result for an anchor; none where it does more."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, Node) or not is_ours(call, "fxopt::mlp_chains"):
        return []
    inputs, state, plan = call.args
    chains = split(plan)  # type: ignore[arg-type]
    layers: list[Layer] = []
    for step in chains[0][1] if len(chains) == 1 else ():
        if step.op == Op.LINEAR:
            weight, bias = (None if at is None else state[at] for at in step.tensors[:2])  # type: ignore[index]
            layers.append(Layer(node, node if layers else inputs[0], weight, bias, ""))  # type: ignore[index,arg-type]
        elif layers and step.op in _ACTIVATIONS and not layers[-1].activation:
            layers[-1] = replace(layers[-1], activation=_ACTIVATIONS[step.op])
        else:
            return []
    return layers
