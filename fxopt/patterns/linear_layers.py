"""Linear layers one by one: as the model wrote them, and on CUDA as earlier passes left them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mlp.plan import Op, split
from fxopt.kernels.mlp.serves import FLOATS, LONG_IN, LONG_PIECE, SHORT_IN, Cut
from fxopt.patterns.core import Match, Reject, Search, calls_of_ours, is_ours
from fxopt.patterns.linear_steps import Found
from fxopt.shape.sizes import same, same_shape, same_sizes, shape_of, static, tensor_of
from fxopt.shape.strides import Layout, Strides, reads_once
from fxopt.shape.view_operators import joined_dim, through
from fxopt.shape.view_steps import Permute

aten = torch.ops.aten
_ACTIVATIONS = {aten.relu.default: "relu", aten.sigmoid.default: "sigmoid"}
_SIZES = "its weight is no matrix, or its bias is no vector of its outputs"


@dataclass(frozen=True)
class Layer:
    """activation(x @ weight.T + bias), x [..., K] and weight [N, K]; `anchor` is the node of its result."""

    anchor: Node
    x: Node
    weight: Node
    bias: Node | None
    activation: str = ""

    @property
    def reads(self) -> list[Node]:
        return [node for node in (self.x, self.weight, self.bias) if node is not None]

    @property
    def steps(self) -> list[Found]:
        steps = [Found(Op.LINEAR, (self.weight, self.bias), (), [self.anchor])]
        if self.activation:
            steps.append(Found(Op[self.activation.upper()], (), (), [self.anchor]))
        return steps


@dataclass(frozen=True)
class Launched:
    """Layers with their activations that have a launch of their own. x, weight: what the first one reads."""

    x: Node
    weight: Node
    steps: list[Found]


def find_layers(search: Search) -> Iterator[Match | Reject]:
    """2-D linears on CUDA that record no gradients, with their activations; what gains nothing is passed over."""
    for node in search.calls(aten.linear.default):
        layer = _cuda_layer(node)
        if layer is not None and not search.inference:
            yield Reject("gradients are on", node)
        elif isinstance(layer, str):
            yield Reject(layer, node)
        elif layer is not None:
            anchor, activation = activated(node)
            if activation or _gains(layer):
                yield Match(anchor, {"arguments": (layer.x, layer.weight, layer.bias, activation)})


def _gains(layer: Layer) -> bool:
    """Whether some way is faster than cuBLAS at some number of rows."""
    outputs, inputs = map(static, shape_of(layer.weight))
    if layer.anchor.meta["val"].dtype is torch.float32 or outputs == 1:
        return inputs is not None
    return inputs is not None and not SHORT_IN < inputs < LONG_IN


def find_joined_layers(search: Search) -> Iterator[Match]:
    """fxopt::gpu_linear of a cat with a long piece that nobody else reads. Matches bind the layer's arguments."""
    for node in calls_of_ours(search.graph, "fxopt::gpu_linear") if search.inference else ():
        cat, *rest = node.args
        if not isinstance(cat, Node) or cat.target is not aten.cat.default or len(cat.users) > 1:
            continue
        pieces: Any = cat.args[0]
        if any(len(shape_of(piece)) != 2 or piece.meta["val"].dtype != torch.float32 for piece in pieces):
            continue  # torch takes one of shape [0] for any rank, and joins dtypes
        widths = [static(shape_of(piece)[1]) or 0 for piece in pieces]
        few = sum(width for width in widths if width < LONG_PIECE) <= SHORT_IN and max(widths) >= LONG_PIECE
        if joined_dim(cat) == 1 and few and not any(map(search.aliases.edited, pieces)):
            yield Match(node, {"arguments": (pieces, *rest)})


def find_turned_layers(search: Search) -> Iterator[Match]:
    """Layers with a bias on CUDA of contiguous rows in another order, where nothing can tell how the result lies; torch
    adds a bias within the product of contiguous tensors alone. Matches bind the `turn` and its `source`.
    """
    found = list(filter(None, map(_turned, search.calls(aten.linear.default)))) if search.inference else []
    if not found:
        return
    aliases, strides = search.aliases, Strides.as_captured(search.graph)
    for layer, source, order in found:
        node = layer.anchor
        if strides.known(source) is not Layout.CONTIGUOUS or any(map(aliases.edited, (source, node))):
            continue
        if strides.asked(node) is Layout.ANY and all(_reads_turned(user, node, order, strides) for user in node.users):
            yield Match(node, {"source": source, "turn": layer.x})


def _turned(node: Node) -> tuple[Layer, Node, tuple[int, ...]] | None:
    """(a layer with a bias, the tensor behind what it reads, which dim of it each of its dims is)"""
    layer = cuda_layer(node, len(shape_of(node)))
    if layer is None or layer.bias is None:
        return None
    source, step = through(layer.x) or (node, None)
    if not isinstance(step, Permute) or step.order[-1] != len(step.order) - 1:
        return None
    long = [dim for dim in step.order if static(shape_of(source)[dim]) != 1]
    return None if long == sorted(long) else (layer, source, step.order)


def _reads_turned(user: Node, node: Node, order: tuple[int, ...], strides: Strides) -> bool:
    """Whether neither it nor what follows needs a copy of `node` in another order: attention, a turn back, or a
    pointwise operator whose result lies as its first argument does.
    """
    _, step = through(user) or (node, None)
    if isinstance(step, Permute):
        return [order[dim] for dim in step.order] == sorted(order)
    first = user.all_input_nodes[0]
    follows = first is not node and reads_once(user) and same_shape(first, user)
    return is_ours(user, "fxopt::attention") or (follows and strides.known(first) is Layout.CONTIGUOUS)


def activated(node: Node) -> tuple[Node, str]:
    """The activation that is all that reads a node, and its name; the node itself and "" where there is none."""
    (user, *others) = node.users or (node,)
    if others or user.target not in _ACTIVATIONS:
        return node, ""
    return user, _ACTIVATIONS[user.target]


def layers_at(node: Node, cut: Cut) -> Layer | Launched | str | None:
    """The layer or layers that a node computes, if `cut` takes them; a reason where it takes none of this kind."""
    if cut.device == "cpu":
        return _cpu_layer(node) if node.target is aten.linear.default else None
    found = cuda_layer(node) or (_launched(node) if cut.launched else None)
    if found is None or node.meta["val"].dtype not in cut.dtypes:
        return None
    sizes = [shape_of(step.tensors[0]) for step in found.steps if step.op == Op.LINEAR]  # type: ignore[arg-type]
    fits = all((static(N) or 0) <= cut.most_out and (static(K) or 1) % cut.aligned == 0 for N, K in sizes)
    return found if fits else None


def _cpu_layer(node: Node) -> Layer | str:
    """A layer as fxopt::mlp takes it, or why it does not."""
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    value, rows = tensor_of(weight), tensor_of(x)  # type: ignore[arg-type]
    if not isinstance(weight, Node) or value is None or rows is None:
        return "its weight is not a tensor"
    if value.dtype != torch.float32 or value.device.type != "cpu" or rows.dtype != torch.float32:
        return f"expected float32 on the CPU, found {value.dtype} on {value.device.type}"
    if not sizes_fit(node):
        return _SIZES
    if not any(static(size) == 1 or same(stride, 1) for size, stride in zip(value.shape, value.stride(), strict=True)):
        return "neither the rows nor the columns of its weight are dense"
    return Layer(node, x, weight, bias if isinstance(bias, Node) else None)  # type: ignore[arg-type]


def cuda_layer(node: Node, most_dims: int = 2) -> Layer | None:
    """A layer as aten has it, or as `find_layers` left it: on CUDA, of one dtype, its weight's sizes known."""
    layer = _cuda_layer(node, most_dims)
    if layer is None or isinstance(layer, str) or any(static(size) is None for size in shape_of(layer.weight)):
        return None
    return layer


def _cuda_layer(node: Node, most_dims: int = 2) -> Layer | str | None:
    """A layer whose result is a matrix on CUDA, or has so many dims; or why it is none that a kernel takes."""
    ours, result = is_ours(node, "fxopt::gpu_linear"), tensor_of(node)
    if (not ours and node.target is not aten.linear.default) or result is None:
        return None
    if result.dtype not in FLOATS or not 2 <= result.dim() <= most_dims or not result.is_cuda:
        return None
    x, weight, bias = (*node.args, None)[:3]
    layer = Layer(node, x, weight, bias, node.args[3] if ours else "")  # type: ignore[arg-type]
    if not sizes_fit(node):
        return _SIZES
    for read in layer.reads:
        value = read.meta["val"]
        if (value.dtype, value.device) != (result.dtype, result.device):
            expected = f"expected {result.dtype} on {result.device}"
            return f"'{read.name}': {expected}, found {value.dtype} on {value.device}"
    return layer


def sizes_fit(linear: Node) -> bool:
    """Whether its weight is a matrix and its bias, if any, a vector of its outputs; torch broadcasts other biases."""
    weight, bias = (*linear.args[1:], None)[:2]
    sizes = shape_of(weight)  # type: ignore[arg-type]
    return len(sizes) == 2 and (bias is None or same_sizes(shape_of(bias), sizes[:1]))  # type: ignore[arg-type]


def _launched(node: Node) -> Launched | None:
    """The layers of a chain that has a launch to itself; None where it does more than layers with activations do."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, Node) or not is_ours(call, "fxopt::mlp_chains"):
        return None
    inputs, state, plan = call.args
    (_, steps), *others = split(plan)  # type: ignore[arg-type]
    plain = {(Op.LINEAR, Op.RELU), (Op.LINEAR, Op.SIGMOID)}
    ops = [step.op for step in steps]
    if others or any(op != Op.LINEAR and (before, op) not in plain for before, op in itertools.pairwise(ops)):
        return None
    found: list[Found] = []
    for step in steps:
        tensors: Any = tuple(None if at is None else state[at] for at in step.tensors[:2])  # type: ignore[index]
        found.append(Found(step.op, tensors, (), [node]))
    return Launched(inputs[0], found[0].tensors[0], found)  # type: ignore[index,arg-type]
