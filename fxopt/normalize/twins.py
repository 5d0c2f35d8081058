"""Common subexpressions: the slice and cast that a model writes 52 times, the constant it makes on every call."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.findings import Change
from fxopt.normalize.changes import change
from fxopt.normalize.gradients import gradient_switches, is_float
from fxopt.normalize.keys import frozen
from fxopt.shape.aliases import Aliases, is_pure

_MOST_BYTES = 1 << 20  # of a literal whose contents are compared


def merge_twins(module: GraphModule, inference: bool = False) -> list[Change]:
    """Let one node stand for all that compute the same, unless two of them are handed out as different memory, or one
    as a tensor that gradients may be asked for.
    """
    aliases, switches = Aliases(module.graph), gradient_switches(module.graph)
    seen: dict[Any, Node] = {}
    changes, recorded = [], None
    for node in list(module.graph.nodes):
        recorded = switches.get(node, recorded)
        if not is_pure(node) or aliases.edited(node):
            continue
        twin = seen.setdefault((recorded, _key(module, node)), node)
        leave = [aliases.leaves(one) for one in (node, twin)]
        if twin is node or all(leave) or (any(leave) and not inference and is_float(node)):
            continue
        if any(aliases.edited_after(read, twin) for read in node.all_input_nodes):
            continue
        if node.op == "call_function":
            changes.append(change(node, "duplicate", "another operator computes the same"))
        aliases.join(twin, node)
        node.replace_all_uses_with(twin)
        module.graph.erase_node(node)
    return changes


def _key(module: GraphModule, node: Node) -> Any:
    """What two nodes have in common exactly if they compute the same."""
    if node.op == "get_attr" and node.meta.get("literal"):
        tensor = getattr(module, str(node.target))
        if tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= _MOST_BYTES:
            return (
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
            )
    return node.op, node.target, node.meta.get("bound"), frozen(node.args), frozen(node.kwargs)
