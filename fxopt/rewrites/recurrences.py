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
    results = (_packed if "batch_sizes" in match.bound else _padded)(editor, match)
    values = {user: like(editor, user, results[user.args[1]]) for user in match.anchor.users}  # type: ignore[index]
    count = len(match.bound["weights"])
    what = f"{count} recurrent {'layers' if count > 1 else 'layer'} into a linear layer and one call each"
    return Replacement(values, what, "the same operations on each row, step by step")


def _padded(editor: Editor, match: Match) -> tuple[Node, Node]:
    """The states of the last layer, and the last states of all."""
    bound, value, last = match.bound, match.bound["x"], []
    for layer, (w_in, w, b_in, b) in enumerate(bound["weights"]):
        gates = editor.call(aten.linear.default, value, w_in, b_in)
        if layer == 0 and bound["batch_first"]:
            gates = editor.call(aten.transpose.int, gates, 0, 1)
        initial = editor.call(aten.select.int, bound["initial"], 0, layer)
        value = editor.ours(OPERATORS, "gru", None, gates, initial, w, b)
        value.meta["axes"] = [([1, 0, *(None for given in (w, b) if given is not None)], [1])]
        last.append(editor.call(aten.select.int, value, 0, -1))
    if bound["batch_first"]:
        value = editor.call(aten.transpose.int, value, 0, 1)
    return value, editor.call(aten.stack.default, last)


def _packed(editor: Editor, match: Match) -> tuple[Node, Node]:
    """The same of packed sequences, whose rows are packed in the results as they are in x."""
    bound, value, last = match.bound, match.bound["x"], []
    for layer, (w_in, w, b_in, b) in enumerate(bound["weights"]):
        gates = editor.call(aten.linear.default, value, w_in, b_in)
        initial = editor.call(aten.select.int, bound["initial"], 0, layer)
        states = editor.ours(OPERATORS, "packed_gru", None, gates, bound["batch_sizes"], initial, w, b)
        value, ends = (editor.call(operator.getitem, states, place) for place in range(2))
        last.append(ends)
    return value, editor.call(aten.stack.default, last)


REWRITE = Rewrite(
    "recurrences",
    find_recurrences,
    replace_recurrence,
    why="before linear layers are chained, of which each recurrent layer has one",
    policy=MEASURED,
)
