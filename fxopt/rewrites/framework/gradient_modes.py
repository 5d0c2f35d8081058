"""No rewrite reaches across a switch of gradients: what `with torch.no_grad()` cut off would get some, or lose them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.regions import before
from fxopt.torch_internals.autograd import set_grad_enabled

Values = Mapping[Node, Node | None]
_REASON = "gradients are switched on or off between '{}' and the others"


def stay_on_one_side(editor: Editor, values: Values) -> None:
    """Raises Rejected where what is replaced, moved or put in place is not all in one mode."""
    graph = editor.module.graph
    if not graph.find_nodes(op="call_function", target=set_grad_enabled):
        return
    modes = _modes(editor)
    mode = modes[editor.point]
    origin = dict(editor.moved)
    for node in [*before(list(values)).inside, *origin]:
        place = node
        while place in origin:  # where it stood before it moved
            place = origin[place]
        if _is_float(node) and modes[place] != mode:
            raise Rejected(_REASON.format(node.name))
    for old, new in values.items():
        if new is not None and new not in editor.added and _is_float(old) and modes[new] and not modes[old]:
            raise Rejected(_REASON.format(new.name))


def _modes(editor: Editor) -> dict[Node, bool]:
    """Whether gradients are on where each node stands."""
    modes, on = dict[Node, bool](), torch.is_grad_enabled()
    for node in editor.module.graph.nodes:
        modes[node] = on
        if node.target is set_grad_enabled:
            on = bool(node.args[0])
    return modes


def _is_float(node: Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    return any(
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) for value in values
    )
