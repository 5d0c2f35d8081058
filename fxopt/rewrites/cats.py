"""Redundant cats and stacks: cats of cats, of neighbouring slices, of one tensor, and those that are split again."""

from __future__ import annotations

import torch

from fxopt.patterns.cats import find_cats
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.rewrites.views import made
from fxopt.shape.calls import name_of

aten = torch.ops.aten


def replace_cat(editor: Editor, match: Match) -> Replacement:
    bound, node = match.bound, match.anchor
    reads = bound["reads"]
    if "pieces" in bound:
        values = dict(zip(bound["pieces"], reads, strict=True))
        return Replacement(values, f"{name_of(node)}, then its pieces -> the inputs", "each piece is exactly one input")
    if "stack" in bound:
        value = editor.call(aten.stack.default, list(reads), bound["stack"])
        return Replacement(
            {node: value}, f"cat of {len(reads)} unsqueezed -> stack", "the same copies to the same places"
        )
    if "cat" in bound:
        value = editor.call(aten.cat.default, list(reads), bound["cat"])
        return Replacement({node: value}, f"stack, {name_of(node)} -> cat", "the same copies to the same places")
    parts = [made(editor, source, steps) for source, steps in zip(reads, bound["steps"], strict=True)]
    value = parts[0] if len(parts) == 1 else editor.call(aten.cat.default, parts, bound["dim"])
    into = f"cat of {len(parts)}" if len(parts) > 1 else value.name if not bound["steps"][0] else name_of(value)
    what = f"{name_of(node)} of {len(node.args[0])} -> {into}"  # type: ignore[arg-type]
    return Replacement({node: value}, what, "the same elements in the same order")


REWRITE = Rewrite("cats", find_cats, replace_cat, why="after the views, whose chains hide neighbours from each other")
