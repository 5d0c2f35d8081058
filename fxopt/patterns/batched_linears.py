"""Linear layers of the same sizes on CUDA that need not wait for one another: experts, gates, towers."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from fxopt.patterns.core import Match, Reject
from fxopt.patterns.groups import group
from fxopt.patterns.linear_layers import Layer, cuda_layer
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static
from fxopt.shape.standing import analysed

_FEWEST = 3  # layers: to stack their weights and biases takes two launches
_MOST_DIMS = 4


def find_batched_linears(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that differ only in their tensors, and what they read."""
    if not inference:
        return
    aliases = analysed(module.graph, Aliases)
    alike: dict[object, list[Layer]] = {}
    for node in module.graph.nodes:
        layer = cuda_layer(node, _MOST_DIMS)
        if layer is None or any(map(aliases.edited, [node, *layer.reads])):
            continue
        if not all(map(static, (*shape_of(layer.x)[1:-1], *shape_of(layer.weight)))):
            continue  # dims that rows are made of, and are cut into again
        if any(user.op == "output" for user in node.users):
            continue  # it would keep the results of all others alive
        sizes = tuple(map(expression, (*shape_of(layer.x), *shape_of(layer.weight))))
        value = node.meta["val"]
        key = sizes, value.dtype, value.device, layer.bias is None, layer.activation
        alike.setdefault(key, []).append(layer)
    for layers in alike.values():
        for together in group(module.graph, layers, aliases):
            if len(together) >= _FEWEST:
                reads = [node for layer in together for node in layer.reads]
                yield Match(min(layer.anchor for layer in together), {"layers": together, "reads": reads})
