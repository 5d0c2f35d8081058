"""Linear layers on CUDA one behind the other, which a single launch can serve while rows are few."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.gpu_few_rows.op import ALIGNED, MOST_LAYERS
from fxopt.patterns.core import Match, Reject
from fxopt.patterns.gpu_linears import Layer, layer_at
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import shape_of, static, tensor_of


def find_gpu_few_rows(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers` (Layer), from two up, each read by the next one alone."""
    if not inference:
        return
    aliases, taken = Aliases(module.graph), set[Node]()
    for node in module.graph.nodes:
        layer = None if node in taken else _layer(node)
        if layer is None:
            continue
        layers = [layer]
        while (following := _following(layers[-1])) and len(layers) < MOST_LAYERS:
            layers.append(following)
        taken.update(layer.anchor for layer in layers)
        if len(layers) == 1:
            continue
        nodes = [node for layer in layers for node in (layer.anchor, *layer.reads)]
        if edited := next(filter(aliases.edited, nodes), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
        else:
            yield Match(layers[-1].anchor, {"layers": layers, "nodes": nodes})


def _following(layer: Layer) -> Layer | None:
    (user, *others) = layer.anchor.users or (None,)
    following = _layer(user) if user is not None and not others else None
    return following if following is not None and following.x is layer.anchor else None


def _layer(node: Node) -> Layer | None:
    layer = layer_at(node)
    if layer is None or (value := tensor_of(node)) is None or value.dtype != torch.float32:
        return None
    inputs = static(shape_of(layer.weight)[1])
    return layer if inputs and inputs % ALIGNED == 0 else None
