"""Finds the concatenation, its layers and what follows, from linear(cat([q, k, q - k, q * k]), W) on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxopt.kernels.target_attention.plan import MOST_POSITIONS_ON_CUDA, MOST_WIDTH_ON_CUDA, Plan
from fxopt.normalize import switches_gradients
from fxopt.patterns.core import Match, Reject, Search, devices
from fxopt.patterns.target_attention.layers import Layers, Value, allocated
from fxopt.patterns.target_attention.layout import Layout, Sizes, viewed
from fxopt.patterns.target_attention.tail import Tail
from fxopt.patterns.target_attention.terms import Source, Terms
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import name_of
from fxopt.shape.sizes import shape_of, static

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # in float64, folding a weight costs more than it saves

_ACTIVATIONS = {
    aten.sigmoid.default,
    aten.tanh.default,
    aten.relu.default,
    aten.prelu.default,
    aten.leaky_relu.default,
}


@dataclass(frozen=True)
class Found:
    """The operator's inputs and its plan; `layout` is that of the node it stands for, of `width` channels."""

    rows: tuple[Source, ...]
    positions: tuple[Source, ...]
    masks: tuple[Source, ...]
    params: tuple[Node, ...]
    plan: Plan
    layout: Layout
    sizes: Sizes
    width: int


def find_target_attention(search: Search) -> Iterator[Match | Reject]:
    """Matches bind `found` and what it reads."""
    if switches_gradients(search.graph):
        return
    for node in search.calls(aten.linear.default):
        cat = _concatenation(node)
        if cat is None or cat.meta["val"].device.type not in devices(search.inference):
            continue
        found = _Search(node, cat, search.aliases).run()
        if isinstance(found, Match) and found.on_cuda and (why := _too_large(found.bound["found"])):
            found = Reject(why, found.anchor)
        if found is not None:
            yield found


def _too_large(found: Found) -> str:
    """For the kernel on a GPU."""
    plan = found.plan
    weights = [found.params[number] for number in (plan.weight, *(weight for weight, _ in plan.layers))]
    widest = max([static(shape_of(weight)[0]) or 0 for weight in weights] + [found.width])
    if widest > MOST_WIDTH_ON_CUDA:
        return f"expected at most {MOST_WIDTH_ON_CUDA} columns, found {widest}"
    if (static(found.sizes.T) or 0) > MOST_POSITIONS_ON_CUDA:
        return f"expected at most {MOST_POSITIONS_ON_CUDA} positions, found {found.sizes.T}"
    return ""


def _concatenation(linear: Node) -> Node | None:
    """The cat [B, T, K] that a linear reads, maybe as [B * T, K]."""
    cat = linear.args[0]
    while isinstance(cat, Node) and cat.target in (aten.view.default, aten.reshape.default, aten.flatten.using_ints):
        cat = cat.args[0]
    if not isinstance(cat, Node) or cat.target is not aten.cat.default or len(cat.args) < 2:
        return None
    shape = shape_of(cat)
    if len(shape) != 3 or cat.args[1] not in (-1, 2) or static(shape[1]) == 1 or static(shape[2]) is None:
        return None
    operands = cat.args[0]
    shapes = [shape_of(operand) for operand in operands]  # type: ignore[union-attr, arg-type]
    alike = all(len(sizes) == 3 and static(sizes[2]) is not None for sizes in shapes)
    return cat if alike and cat.meta["val"].dtype in _FLOATS else None


class _Search:
    def __init__(self, linear: Node, cat: Node, aliases: Aliases) -> None:
        self.linear, self.cat, self.edited = linear, cat, aliases.edited
        shape = shape_of(cat)
        self.sizes, self.dtype = Sizes(shape[0], shape[1]), cat.meta["val"].dtype

    def run(self) -> Match | Reject | None:
        terms = Terms(self.sizes, self.edited)
        found = tuple(terms.of(list(self.cat.args[0])))  # type: ignore[arg-type]
        if not any(term.row >= 0 for term in found) or not any(term.position >= 0 for term in found):
            return None
        sources = [source.node for source in (*terms.rows, *terms.positions)]
        if any(self.edited(node) for node in (*sources, self.cat)):
            return Reject("what its first layer reads is edited in place", self.linear)
        if any(source.meta["val"].dtype != self.dtype for source in sources):
            return Reject("its inputs have different dtypes", self.linear)
        layers = Layers(self.sizes, self.dtype, self.edited)
        if (start := self._first(layers)) is None:
            return Reject("its first weight is not a plain matrix of the same dtype", self.linear)
        scores = self._scores(layers)
        if isinstance(scores, Reject):
            return scores
        tail = Tail(self.sizes, self.dtype, self.edited, scores, layers.values[scores].layout)
        tail.follow()
        steps = allocated(layers.steps, layers.values[scores].number)
        if steps is None:
            return Reject("its activations need too many intermediate values at once", self.linear)
        values = -1
        if tail.values is not None:
            if tail.values not in terms.positions:
                terms.positions.append(tail.values)
            values = terms.positions.index(tail.values)
        plan = Plan(
            *start,
            found,
            tuple(layers.layers),
            tuple(layers.norms),
            tuple(layers.constants),
            *steps,
            tuple(tail.steps),
            values,
        )
        tensors = tuple(terms.rows), tuple(terms.positions), tuple(tail.masks), tuple(layers.params)
        width = tail.width if values >= 0 else 1
        reads = [source.node for source in (*terms.rows, *terms.positions, *tail.masks)] + layers.params
        return Match(tail.node, {"found": Found(*tensors, plan, tail.layout, self.sizes, width), "reads": reads})

    def _first(self, layers: Layers) -> tuple[int, int] | None:
        """The parameters of the first linear, whose result is register 0."""
        weight = self.linear.args[1]
        bias = self.linear.args[2] if len(self.linear.args) > 2 else None
        for param in (weight, bias):
            if isinstance(param, Node) and (param.meta["val"].dtype != self.dtype or self.edited(param)):
                return None
        if not isinstance(weight, Node) or (N := static(shape_of(weight)[0])) is None or self.edited(self.linear):
            return None
        layout: Layout | None = ("B", "T", "C")
        if self.linear.args[0] is not self.cat:
            source: Node = self.linear.args[0]  # type: ignore[assignment]
            layout = viewed(source, ("B", "T", "C"), self.sizes, static(shape_of(self.cat)[2]) or 0)
        if layout is None or layout[-1] != "C":
            return None
        labels = tuple("1" if label == "C" and N == 1 else label for label in layout)
        layers.values[self.linear] = Value(0, labels, N)
        return layers.param(weight), layers.param(bias)

    def _scores(self, layers: Layers) -> Node | Reject:
        """The last node with one channel per position that the layers reach, and nothing but the next one reads."""
        scores = self.linear if layers.values[self.linear].channels == 1 else None
        node = self.linear.next
        outside: Node | None = None
        while node.op != "root":
            if any(operand in layers.values for operand in node.all_input_nodes):
                done = scores is not None and all(
                    layers.values[operand].channels == 1 for operand in node.all_input_nodes if operand in layers.values
                )
                value = layers.add(node) if not done or node.target in _ACTIVATIONS else None
                if value is None:
                    if not done and outside is None:
                        outside = node
                elif value.channels == 1:
                    scores = node
            node = node.next
        if scores is None:
            return self._why_not(outside)
        if outside is not None and _is_wide(outside, layers):
            return Reject("an intermediate value of its layers is used elsewhere", outside)
        return scores

    def _why_not(self, outside: Node | None) -> Reject:
        name = "nothing" if outside is None else name_of(outside)
        if outside is not None and (name == "dropout" or (name == "batch_norm" and outside.args[5])):
            return Reject(f"its {name} is in training mode", outside)
        return Reject(f"its layers do not end in one score per position: '{name}' follows", outside or self.linear)


def _is_wide(outside: Node, layers: Layers) -> bool:
    """Whether it reads more than scores."""
    known = [layers.values[operand] for operand in outside.all_input_nodes if operand in layers.values]
    return any(value.channels > 1 for value in known)
