"""torch.tensor(...) in forward is traced as copies of a constant; nobody else holds it, so it is read directly."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fxopt.normalize.dead import remove_dead_code
from fxopt.normalize.same import is_plain_cast
from fxopt.shape.aliases import Aliases

aten = torch.ops.aten


def fold_literals(module: GraphModule) -> None:
    """Read literals directly where nothing edits them or takes them out; mark them meta["literal"]."""
    literals: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        constant = _literal_behind(node, literals)
        if constant is not None:
            literals[node] = constant
    if not literals:
        return
    aliases = Aliases(module.graph)
    for node, constant in literals.items():
        if not aliases.edited(node) and not aliases.leaves(node):
            constant.meta["literal"] = True
            node.replace_all_uses_with(constant)
    remove_dead_code(module)


def _literal_behind(node: Node, literals: dict[Node, Node]) -> Node | None:
    """The constant that `node` is a fresh copy of."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.lift_fresh_copy.default:
        return source if source.op == "get_attr" else None
    if source in literals and (node.target is aten.detach.default or is_plain_cast(node)):
        return literals[source]  # a constant has no gradient to detach from
    return None
