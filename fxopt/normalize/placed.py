"""Tensors that are made of sizes alone on the CPU and then moved to a GPU: made there.

`torch.triu(torch.ones(L, L)).type_as(mask)`, `x[torch.arange(len(x)), last]`: each call would wait for a copy from the
host, and no CUDA graph can hold one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt.findings import Change
from fxopt.normalize.changes import change
from fxopt.shape.aliases import Aliases, is_pure
from fxopt.shape.calls import closure, is_pointwise
from fxopt.shape.expressions import is_size
from fxopt.shape.sizes import is_tensor, tensor_of
from fxopt.shape.view_operators import CASTS, VIEWS
from fxopt.torch_internals.fake_tensors import mode_of

aten = torch.ops.aten
_FILLS = {aten.zeros.default, aten.ones.default, aten.full.default}
_RANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_ARRANGE = {
    aten.triu.default, aten.tril.default, aten.cat.default, aten.stack.default, aten.repeat.default,
    aten.repeat_interleave.self_int, aten.clone.default, aten.contiguous.default,
}  # fmt: skip
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_ROUNDED_ALIKE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.rsub.Scalar, aten.neg.default}


def place_constants(module: GraphModule) -> list[Change]:
    """Every number is the same: what the two devices might round apart stays where it is."""
    sites = [(node, source) for node in module.graph.nodes for source in _moved(node)]
    if not sites:
        return []
    placed, changes = _Placed(module), []
    for node, source in sites:
        made = placed.made(source, tensor_of(node).device)  # type: ignore[union-attr]
        if made is not None:
            node.replace_input_with(source, made)
            changes.append(change(node, f"{source.name} on the CPU", "made of sizes alone, where it is read"))
    return changes


def _moved(node: Node) -> Iterator[Node]:
    """What an operator takes from the CPU to the GPU that its result is on."""
    value = tensor_of(node)
    if node.op != "call_function" or value is None or not value.is_cuda or not node.args:
        return
    read = node.args[:1] if node.target in CASTS else node.args[1] if node.target in _INDEXED else ()
    for source in read:  # type: ignore[union-attr]
        if is_tensor(source) and not source.meta["val"].is_cuda:
            yield source


class _Placed:
    """Copies of calls, on other devices, each behind its original."""

    def __init__(self, module: GraphModule) -> None:
        self._aliases = Aliases(module.graph)
        self._made: dict[tuple[Node, torch.device], Node] = {}

    def made(self, node: Node, device: torch.device) -> Node | None:
        """None: not all of it is made of sizes, exactly, and never edited."""
        behind = closure([node], lambda call: [read for read in call.all_input_nodes if not is_size(read)])
        if not all(map(self._may_move, behind)):
            return None
        for call in sorted(behind):
            if (call, device) not in self._made:
                self._made[call, device] = self._copied(call, device)
        return self._made[node, device]

    def _may_move(self, node: Node) -> bool:
        value = tensor_of(node)
        if node.op != "call_function" or value is None or not isinstance(node.target, OpOverload):
            return False
        if value.device.type != "cpu" or not is_pure(node) or self._aliases.edited(node):
            return False
        if node.target in _FILLS | VIEWS | _ARRANGE | {aten.to.dtype}:
            return True
        if node.target in _RANGES:
            return not value.is_floating_point()
        return is_pointwise(node.target) and (node.target in _ROUNDED_ALIKE or not value.is_floating_point())

    def _copied(self, node: Node, device: torch.device) -> Node:
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node, lambda n: self._made.get((n, device), n))
        if node.target in _FILLS | _RANGES:
            copy.kwargs = {**copy.kwargs, "device": device}
        args, kwargs = map_arg((copy.args, dict(copy.kwargs)), lambda n: n.meta["val"])
        with mode_of(node.meta["val"]):
            copy.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return copy
