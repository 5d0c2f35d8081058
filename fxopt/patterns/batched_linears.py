"""Linear layers on CUDA that need not wait for one another, of one input or of one size: experts, gates, towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.groups import alike
from fxopt.patterns.linear_layers import Layer, cuda_layer
from fxopt.shape.sizes import Size, expression, shape_of, static
from fxopt.shape.strides import Layout

_FEWEST = 3  # layers: to stack their weights and biases takes two launches
_MOST_DIMS = 4


def find_wide_linears(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that read one matrix and differ only in their weights and biases, and what
    they read. Their results become slices."""

    def key(layer: Layer) -> object:
        """Of a slice the strides differ: where they are seen, the layer stays alone."""
        return layer.x if search.strides.asked(layer.anchor) is not Layout.CONTIGUOUS else layer

    yield from _together(search, 2, key)


def find_batched_linears(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that differ only in their tensors, and what they read."""
    yield from _together(search, _MOST_DIMS, lambda layer: tuple(map(expression, _sizes(layer))))


def _sizes(layer: Layer) -> tuple[Size, ...]:
    return *shape_of(layer.x), *shape_of(layer.weight)


def _layers(search: Search, most_dims: int) -> Iterator[Layer]:
    for node in search.graph.nodes if search.inference else ():
        layer = cuda_layer(node, most_dims)
        if layer is None or any(map(search.aliases.edited, [node, *layer.reads])):
            continue
        if not all(map(static, (*shape_of(layer.x)[1:-1], *shape_of(layer.weight)))):
            continue  # dims that rows are made of, and are cut into again
        if not search.aliases.leaves(node):  # it would keep the results of all others alive
            yield layer


def _together(search: Search, most_dims: int, key: Callable[[Layer], object]) -> Iterator[Match]:
    """Layers of one key, dtype, device and activation, all with a bias or none."""

    def whole(layer: Layer) -> object:
        value = layer.anchor.meta["val"]
        return key(layer), value.dtype, value.device, layer.bias is None, layer.activation

    for together in alike(search, _layers(search, most_dims), whole):
        if len(together) >= _FEWEST:
            reads = [node for layer in together for node in layer.reads]
            yield Match(min(layer.anchor for layer in together), {"layers": together, "reads": reads})
