"""Operators that torch refuses for no data, but for how their arguments lie in memory or where they were made."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fxopt.normalize.gradients import is_float, modes
from fxopt.shape.aliases import Aliases, is_view, views_behind, written_arguments
from fxopt.shape.strides import Strides
from fxopt.shape.view_operators import is_piece

aten = torch.ops.aten
# Whose results may hold one element in several places.
_OVERLAPS = frozenset({
    aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.broadcast_tensors.default,
    aten.as_strided.default, aten.unfold.default,
})  # fmt: skip


class Refusals:
    """What of a graph may be refused at some sizes or strides, although the capture served."""

    def __init__(self, graph: Graph) -> None:
        self._aliases, self._strides, self._recorded = Aliases(graph), Strides(graph), modes(graph)

    def may_meet(self, node: Node) -> bool:
        """Whether this call may be refused: a view of what is not contiguous, an edit of what overlaps, or a use of a
        view whose memory was edited, where it was made with gradients off, or is one of several of one call.
        """
        return self._strides.may_refuse(node) or self._may_overlap(node) or self._may_be_forbidden(node)

    def _may_overlap(self, node: Node) -> bool:
        behind = (view for edited in written_arguments(node) for view in views_behind(edited))
        return self._aliases.overlaps(node) or any(view.target in _OVERLAPS for view in behind)

    def _may_be_forbidden(self, node: Node) -> bool:
        if node.op != "call_function" or not self._recorded[node]:
            return False
        return any(
            is_float(argument) and self._aliases.edited(argument) and any(map(self._is_frail, views_behind(argument)))
            for argument in node.all_input_nodes
        )

    def _is_frail(self, view: Node) -> bool:
        return is_piece(view) or (is_view(view) and not self._recorded[view])
