"""What follows the product in a layer of a cross network, on CUDA: x0 * product + x, with a bias or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mlp.serves import FLOATS
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.linear_layers import Layer, cuda_layer
from fxopt.shape.sizes import same, same_shape, shape_of, static, tensor_of

aten = torch.ops.aten


def find_cross_layers(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `layer`, the arguments of fxopt::gpu_cross, or `matrix`, (x0, product, x)."""
    if not search.inference:
        return
    for node in reversed(search.calls(aten.add.Tensor)):
        if not _is_plain(node, node) or search.aliases.edited(node):
            continue
        bound = _by_layer(node) or _by_matrix(node)
        if bound is not None and not any(
            search.aliases.edited(n) for part in bound.values() for n in part if n is not None
        ):
            yield Match(node, bound)


def _is_plain(node: Any, like: Node) -> bool:
    """A 2-D tensor on CUDA of the dtype and sizes of `like`."""
    value = tensor_of(node)
    if value is None or value.dim() != 2 or not value.is_cuda or value.dtype not in FLOATS:
        return False
    return value.dtype == like.meta["val"].dtype and same_shape(node, like)


def _terms(node: Any) -> list[Any]:
    """What a sum adds up."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return [node]
    terms: list[Any] = []
    for part in node.args:
        alone = isinstance(part, Node) and len(part.users) == 1 and part.target is aten.add.Tensor
        terms += _terms(part) if alone else [part]
    return terms


def _by_layer(node: Node) -> dict[str, Any] | None:
    """Of a layer whose weight is a vector, or a matrix in float32, that reads what is added."""
    terms = _terms(node)
    for product in terms:
        others = [term for term in terms if term is not product]
        if len(others) != len(terms) - 1 or not _is_product(product):
            continue
        for x0, scale in (product.args, product.args[::-1]):
            layer = _scaling_layer(scale)
            if layer is None or layer.x not in others or not all(_is_plain(x, node) for x in (x0, layer.x)):
                continue
            others.remove(layer.x)
            by_vector = static(shape_of(layer.weight)[0]) == 1
            if not others or (len(others) == 1 and by_vector and _is_vector(others[0], node)):
                return {"layer": (x0, layer.x, layer.weight, layer.bias, *(others or [None]))}
    return None


def _by_matrix(node: Node) -> dict[str, Any] | None:
    left, right = node.args[:2]
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for product, x in ((left, right), (right, left)):
        if _is_product(product) and product is not x and _is_plain(x, node):
            factors: Any = product.args  # type: ignore[union-attr]
            if all(_is_plain(factor, node) for factor in factors):
                return {"matrix": (*factors, x)}
    return None


def _is_product(node: Any) -> bool:
    alone = isinstance(node, Node) and node.target is aten.mul.Tensor and len(node.users) == 1
    return alone and all(isinstance(factor, Node) for factor in node.args)


def _scaling_layer(node: Node) -> Layer | None:
    """A layer without activation that nobody else reads: of one output, or of float32 and as many as inputs."""
    layer = cuda_layer(node) if len(node.users) == 1 else None
    if layer is None or layer.activation:
        return None
    outputs, inputs = shape_of(layer.weight)
    square = outputs == inputs and node.meta["val"].dtype is torch.float32
    return layer if square or static(outputs) == 1 else None


def _is_vector(node: Any, like: Node) -> bool:
    """A number for each column of `like`, of its dtype."""
    value = tensor_of(node)
    if value is None or value.dtype != like.meta["val"].dtype or not value.is_cuda or value.dim() not in (1, 2):
        return False
    one = value.dim() == 1 or static(value.shape[0]) == 1
    return one and same(value.shape[-1], shape_of(like)[1])
