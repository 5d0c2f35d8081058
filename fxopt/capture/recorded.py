"""From what a tracer recorded to a graph module: no transforms, no dead sizes, no parameters of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxopt.capture.errors import CaptureError
from fxopt.shape.conditions import unless_bad
from fxopt.torch_internals.autograd import set_grad_enabled
from fxopt.torch_internals.symbols import expression, free_unbacked_symbols, is_accessor_node
from fxopt.torch_internals.tracing import SYMBOLIC, LazyGraphModule

if TYPE_CHECKING:
    from fxopt.capture.trace import Tracer


def refuse_transforms(graph: torch.fx.Graph) -> None:
    """vmap, jvp and operators with subgraphs leave nodes that are no operators, and do not run again."""
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
            continue
        if _is_size(node) and not node.users:  # (n / 4).is_integer(), whose answer is a condition by now
            continue
        plain = getattr(node.target, "__module__", "") in ("_operator", "builtins", "math", "torch")
        if node.target is getattr:  # x.data
            continue
        if not plain and node.target not in (set_grad_enabled, unless_bad):
            raise CaptureError(f"uses {getattr(node.target, '__name__', node.target)}", node.meta["place"])


def graph_module(tracer: Tracer) -> torch.fx.GraphModule:
    constants = {n: tracer.root.__dict__.pop(n) for n in tracer.tensor_attrs.values()}
    root = {**constants, **dict(tracer.root.named_children())}
    module = LazyGraphModule(root, tracer.graph, "Captured")  # compiled where it runs: most never do
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or not _is_size(node))
    _share_sizes(module.graph)
    for name, tensor in constants.items():  # plain attributes: not in the state_dict, not moved, the very same tensor
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.__dict__[name] = tensor
    return module


def _is_size(node: torch.fx.Node) -> bool:
    """Reads a size, or computes with sizes only (an .item() is neither)."""
    if is_accessor_node(node):
        return True
    return isinstance(node.meta.get("val"), SYMBOLIC) and all(
        isinstance(a.meta.get("val"), SYMBOLIC) for a in node.all_input_nodes
    )


def _share_sizes(graph: torch.fx.Graph) -> None:
    """One node for each distinct size expression."""
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt) and not free_unbacked_symbols(value):
            kept = first.setdefault(expression(value), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
