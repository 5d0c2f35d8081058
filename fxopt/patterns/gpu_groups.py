"""Linear layers of the same sizes on CUDA that need not wait for one another: experts, gates, towers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.patterns.core import Match, Reject
from fxopt.patterns.groups import group
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of, static, tensor_of

aten = torch.ops.aten
_FEWEST = 3  # layers: to stack their weights and biases takes two launches
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """activation(x @ weight.T + bias)."""

    anchor: Node
    x: Node
    weight: Node
    bias: Node | None
    activation: str

    @property
    def reads(self) -> list[Node]:
        return [node for node in (self.x, self.weight, self.bias) if node is not None]


def find_gpu_groups(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind `layers`, at least three that differ only in their tensors, and what they read."""
    if not inference:
        return
    aliases = Aliases(module.graph)
    alike: dict[object, list[Layer]] = {}
    for node in module.graph.nodes:
        layer = _layer(node)
        if layer is None or any(map(aliases.edited, [node, *layer.reads])):
            continue
        if any(user.op == "output" for user in node.users):
            continue  # it would keep the results of all others alive
        sizes = tuple(map(_size, (*shape_of(layer.x), *shape_of(layer.weight))))
        value = node.meta["val"]
        key = sizes, value.dtype, value.device, layer.bias is None, layer.activation
        alike.setdefault(key, []).append(layer)
    for layers in alike.values():
        for together in group(module.graph, layers, aliases):
            if len(together) >= _FEWEST:
                reads = [node for layer in together for node in layer.reads]
                yield Match(min(layer.anchor for layer in together), {"layers": together, "reads": reads})


def _layer(node: Node) -> Layer | None:
    ours = getattr(node.target, "name", str)() == "fxopt::gpu_linear"
    if not ours and node.target is not aten.linear.default:
        return None
    x, weight, bias = (*node.args, None)[:3]
    tensors: list[Any] = [tensor for tensor in (node, x, weight, bias) if isinstance(tensor, Node)]
    values = [tensor_of(tensor) for tensor in tensors]
    first = values[0]
    if first is None or first.dtype not in _FLOATS or first.dim() != 2 or not first.is_cuda:
        return None
    if any(v is None or v.dtype != first.dtype or v.device != first.device for v in values):
        return None
    if any(static(size) is None for size in shape_of(weight)):  # type: ignore[arg-type]
        return None
    activation: Any = node.args[3] if ours else ""
    return Layer(node, x, weight, bias, activation)  # type: ignore[arg-type]


def _size(size: Any) -> Any:
    return expression(size) if isinstance(size, torch.SymInt) else size
