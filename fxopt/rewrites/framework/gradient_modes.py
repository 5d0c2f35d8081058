"""No rewrite reaches across a switch of gradients: what `with torch.no_grad()` cut off would get some, or lose them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from fxopt.normalize.gradients import is_float, modes, switches_gradients
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.regions import before
from fxopt.shape.calls import closure

Values = Mapping[Node, Node | None]
_REASON = "gradients are switched on or off between '{}' and the others"


def stay_on_one_side(editor: Editor, values: Values) -> None:
    """Raises Rejected where what is replaced, moved, read or put in place is not all in one mode."""
    graph = editor.module.graph
    if not switches_gradients(graph):
        return
    recorded = modes(graph)
    mode = recorded[editor.point]
    origin = dict(editor.moved)
    region = before(list(values))
    for node in [*region.inside, *origin]:
        place = node
        while place in origin:  # where it stood before it moved
            place = origin[place]
        if is_float(node) and recorded[place] != mode:
            raise Rejected(_REASON.format(node.name))
    for old, new in values.items():
        if new is not None and new not in editor.added and is_float(old) and recorded[new] and not recorded[old]:
            raise Rejected(_REASON.format(new.name))
    known = closure(region.reads, lambda node: node.all_input_nodes if recorded[node] else ())
    for read in _read(editor, values):
        if mode and is_float(read) and read not in known:
            raise Rejected(_REASON.format(read.name))


def _read(editor: Editor, values: Values) -> list[Node]:
    """What was there before, and is read from now on."""
    reads = [read for node in editor.added for read in node.all_input_nodes]
    return [read for read in (*reads, *values.values()) if read is not None and read not in editor.added]
