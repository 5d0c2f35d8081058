"""Dead code."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt.shape.aliases import has_effects

_KEPT = ("placeholder", "output", "call_module")


def remove_dead_code(module: GraphModule) -> None:
    """Drop what no output needs; in-place edits and opaque submodules stay."""
    for node in reversed(module.graph.nodes):
        if not node.users and node.op not in _KEPT and not has_effects(node):
            module.graph.erase_node(node)
