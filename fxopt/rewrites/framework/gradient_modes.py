"""No rewrite reaches across a switch of gradients: what `with torch.no_grad()` cut off would get some, or lose them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from fxopt.normalize.gradients import is_float, modes, switches_gradients
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.regions import before

Values = Mapping[Node, Node | None]
_REASON = "gradients are switched on or off between '{}' and the others"


def stay_on_one_side(editor: Editor, values: Values) -> None:
    """Raises Rejected where what is replaced, moved or put in place is not all in one mode."""
    graph = editor.module.graph
    if not switches_gradients(graph):
        return
    recorded = modes(graph)
    mode = recorded[editor.point]
    origin = dict(editor.moved)
    for node in [*before(list(values)).inside, *origin]:
        place = node
        while place in origin:  # where it stood before it moved
            place = origin[place]
        if is_float(node) and recorded[place] != mode:
            raise Rejected(_REASON.format(node.name))
    for old, new in values.items():
        if new is not None and new not in editor.added and is_float(old) and recorded[new] and not recorded[old]:
            raise Rejected(_REASON.format(new.name))
