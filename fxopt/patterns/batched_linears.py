"""Linear layers on CUDA that need not wait for one another, of one input or of one size: experts, gates, towers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.fx import GraphModule

from fxopt.patterns.core import Match, Reject
from fxopt.patterns.groups import group
from fxopt.patterns.linear_layers import Layer, cuda_layer
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static
from fxopt.shape.standing import analysed
from fxopt.shape.strides import Layout, Strides

_FEWEST = 3  # layers: to stack their weights and biases takes two launches
_MOST_DIMS = 4


def find_wide_linears(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that read one matrix and differ only in their weights and biases, and what
    they read. Their results become slices."""
    aliases = analysed(module.graph, Aliases)
    layers = list(_layers(module, aliases, 2)) if inference else []
    if not layers:
        return
    strides = analysed(module.graph, Strides)

    def key(layer: Layer) -> object:
        """Of a slice the strides differ: where they are seen, the layer stays alone."""
        return layer.x if strides.asked(layer.anchor) is not Layout.CONTIGUOUS else layer

    yield from _together(module, aliases, layers, key)


def find_batched_linears(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that differ only in their tensors, and what they read."""
    aliases = analysed(module.graph, Aliases)

    def sizes(layer: Layer) -> object:
        return tuple(map(expression, (*shape_of(layer.x), *shape_of(layer.weight))))

    yield from _together(module, aliases, _layers(module, aliases, _MOST_DIMS) if inference else (), sizes)


def _layers(module: GraphModule, aliases: Aliases, most_dims: int) -> Iterator[Layer]:
    for node in module.graph.nodes:
        layer = cuda_layer(node, most_dims)
        if layer is None or any(map(aliases.edited, [node, *layer.reads])):
            continue
        if not all(map(static, (*shape_of(layer.x)[1:-1], *shape_of(layer.weight)))):
            continue  # dims that rows are made of, and are cut into again
        if not aliases.leaves(node):  # it would keep the results of all others alive
            yield layer


def _together(
    module: GraphModule, aliases: Aliases, layers: Iterable[Layer], key: Callable[[Layer], object]
) -> Iterator[Match]:
    """Layers of one key, dtype, device and activation, all with a bias or none."""
    alike: dict[object, list[Layer]] = {}
    for layer in layers:
        value = layer.anchor.meta["val"]
        whole = key(layer), value.dtype, value.device, layer.bias is None, layer.activation
        alike.setdefault(whole, []).append(layer)
    for same in alike.values():
        for together in group(module.graph, same, aliases):
            if len(together) >= _FEWEST:
                reads = [node for layer in together for node in layer.reads]
                yield Match(min(layer.anchor for layer in together), {"layers": together, "reads": reads})
