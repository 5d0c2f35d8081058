"""Gated recurrent units: a linear layer over all steps, then one call for the steps of all rows."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.kernels.gru.op import OPERATORS
from fxopt.patterns.recurrences import find_recurrences
from fxopt.rewrites.contractions import like
from fxopt.rewrites.framework import MEASURED, Editor, Match, Replacement, Rewrite

aten = torch.ops.aten


def replace_recurrence(editor: Editor, match: Match) -> Replacement:
    bound, value, last = match.bound, match.bound["x"], []
    for number, (w_in, w, b_in, b) in enumerate(bound["weights"]):
        gates = editor.call(aten.linear.default, value, w_in, b_in)
        if number == 0 and bound.get("batch_first"):
            gates = editor.call(aten.transpose.int, gates, 0, 1)
        initial = editor.call(aten.select.int, bound["initial"], 0, number)
        value, ends = _layer(editor, gates, bound.get("batch_sizes"), initial, w, b)
        last.append(ends)
    if bound.get("batch_first"):
        value = editor.call(aten.transpose.int, value, 0, 1)
    results = value, editor.call(aten.stack.default, last)
    values = {user: like(editor, user, results[user.args[1]]) for user in match.anchor.users}  # type: ignore[index]
    count = len(bound["weights"])
    what = f"{count} recurrent {'layers' if count > 1 else 'layer'} into a linear layer and one call each"
    return Replacement(values, what, "the same operations on each row, step by step")


def _layer(
    editor: Editor, gates: Node, batch_sizes: Node | None, initial: Node, w: Node, b: Node | None
) -> tuple[Node, Node]:
    """Its states, step by step or packed as the gates are, and the last ones."""
    if batch_sizes is not None:
        both = editor.ours(OPERATORS, "packed_gru", None, gates, batch_sizes, initial, w, b)
        return editor.call(operator.getitem, both, 0), editor.call(operator.getitem, both, 1)
    states = editor.ours(OPERATORS, "gru", None, gates, initial, w, b)
    states.meta["axes"] = [([1, 0, *(None for given in (w, b) if given is not None)], [1])]
    return states, editor.call(aten.select.int, states, 0, -1)


REWRITE = Rewrite(
    "recurrences",
    find_recurrences,
    replace_recurrence,
    why="before linear layers are chained, of which each recurrent layer has one",
    policy=MEASURED,
)
