"""Linear layers on CUDA with the activation behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxopt.kernels.mlp.serves import LONG_IN, SHORT_IN
from fxopt.patterns.core import Match, Reject, is_ours
from fxopt.shape.sizes import shape_of, static, tensor_of

aten = torch.ops.aten
_ACTIVATIONS = {aten.relu.default: "relu", aten.sigmoid.default: "sigmoid"}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """activation(x @ weight.T + bias), x [M, K] and weight [N, K]; `anchor` is the node of its result."""

    anchor: Node
    x: Node
    weight: Node
    bias: Node | None
    activation: str

    @property
    def reads(self) -> list[Node]:
        return [node for node in (self.x, self.weight, self.bias) if node is not None]


def find_gpu_linears(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """2-D linears that record no gradients; what gains nothing is passed over."""
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        value = tensor_of(node)
        if value is None or not value.is_cuda or value.dim() != 2 or value.dtype not in _FLOATS:
            continue
        if not inference:
            yield Reject("gradients are on", node)
            continue
        x, weight, bias = (*node.args, None)[:3]
        assert isinstance(x, Node) and isinstance(weight, Node)
        kind = value.dtype, value.device
        values = {n.name: n.meta["val"] for n in (x, weight, bias) if isinstance(n, Node)}
        if other := next((name for name, v in values.items() if (v.dtype, v.device) != kind), None):
            found = values[other]
            yield Reject(f"'{other}': expected {kind[0]} on {kind[1]}, found {found.dtype} on {found.device}", node)
            continue
        anchor, activation = _activated(node)
        outputs, inputs = shape_of(weight)
        width = static(inputs)
        if activation or static(outputs) == 1 or (width is not None and not SHORT_IN < width < LONG_IN):
            yield Match(anchor, {"arguments": (x, weight, bias, activation)})


def layer_at(node: Node) -> Layer | None:
    """A layer as aten has it, or as this pass left it: on CUDA, of one dtype, its weight's sizes known."""
    ours = is_ours(node, "fxopt::gpu_linear")
    if not ours and node.target is not aten.linear.default:
        return None
    x, weight, bias = (*node.args, None)[:3]
    layer = Layer(node, x, weight, bias, node.args[3] if ours else "")  # type: ignore[arg-type]
    first = tensor_of(node)
    if first is None or first.dtype not in _FLOATS or first.dim() != 2 or not first.is_cuda:
        return None
    values = map(tensor_of, layer.reads)
    if any(value is None or value.dtype != first.dtype or value.device != first.device for value in values):
        return None
    return None if any(static(size) is None for size in shape_of(layer.weight)) else layer


def _activated(node: Node) -> tuple[Node, str]:
    (user, *others) = node.users or (node,)
    if others or user.target not in _ACTIVATIONS:
        return node, ""
    return user, _ACTIVATIONS[user.target]
