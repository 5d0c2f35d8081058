"""Two linear layers as one, by the product of their weights, which is made at every call: nothing can be stale."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.patterns.linear_pairs import find_pairs
from fxopt.rewrites.framework import MEASURED, Editor, Match, Replacement, Rewrite

aten = torch.ops.aten


def replace_pair(editor: Editor, match: Match) -> Replacement:
    x, first, bias = _arguments(match.bound["first"])
    _, second, bias_after = _arguments(match.anchor)
    weight = editor.call(aten.mm.default, second, first)
    if bias is not None:
        moved = editor.call(aten.mv.default, second, bias)
        bias_after = moved if bias_after is None else editor.call(aten.add.Tensor, moved, bias_after)
    merged = editor.call(aten.linear.default, x, weight, bias_after)
    K, H, N = match.bound["sizes"]
    return Replacement({match.anchor: merged}, f"[{K}, {H}] and [{H}, {N}] as one matrix", "nothing stands in between")


def _arguments(linear: Any) -> tuple[Any, Any, Any]:
    return (*linear.args, None)[:3]


REWRITE = Rewrite(
    "linear_pairs",
    find_pairs,
    replace_pair,
    why="when every linear is spelled as one, and before they become chains",
    policy=MEASURED,
)
