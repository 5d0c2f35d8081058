"""Dot products of pairs of fields, and the cat that takes them, as one `fxopt::dot_interaction`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.kernels.interactions.dot import OPERATORS
from fxopt.patterns.interactions.dots import find_dots
from fxopt.patterns.interactions.parts import find_parts
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import shape_of

aten = torch.ops.aten


def replace_dots(editor: Editor, match: Match) -> Replacement:
    bound, anchor = match.bound, match.anchor
    i, j = (_index(editor, bound[name]) for name in "ij")
    beside = [list(bound[name]) for name in ("before", "after")]
    before, after = beside if bound["inside"] else ([], [])
    vectors = joined(editor, bound["vectors"])
    dots = editor.ours(OPERATORS, "dot_interaction", None, [vectors], before, after, i, j)
    what = f"{shape_of(i)[0]} dot products of {shape_of(vectors)[1]} vectors"
    if bound["inside"]:
        what += " in one row with what stands beside them"
    elif any(beside):
        dots = editor.call(aten.cat.default, [*beside[0], dots, *beside[1]], 1)
    equal = tuple(zip(shape_of(anchor), shape_of(dots), strict=True)) if len(shape_of(anchor)) == 2 else ()
    return Replacement({anchor: editor.in_shape_of(anchor, dots)}, what, "fp32 with another order of additions", equal)


def _index(editor: Editor, index: Tensor | Node) -> Node:
    return index if isinstance(index, Node) else editor.constant("pairs", index)


def joined(editor: Editor, vectors: Sequence[Node]) -> Node:
    """The vectors as one tensor, which the columns can write: [B, F, D]."""
    if len(vectors) == 1 and len(shape_of(vectors[0])) == 3:
        return vectors[0]
    if all(len(shape_of(node)) == 2 for node in vectors):
        return editor.call(aten.stack.default, list(vectors), 1)
    blocks = [node if len(shape_of(node)) == 3 else editor.call(aten.unsqueeze.default, node, 1) for node in vectors]
    return editor.call(aten.cat.default, blocks, 1)


def replace_parts(editor: Editor, match: Match) -> Replacement:
    """The same interaction of several tensors."""
    _, before, after, i, j = match.anchor.args
    parts = list(match.bound["parts"])
    dots = editor.ours(OPERATORS, "dot_interaction", None, parts, before, after, i, j)
    what = f"{len(parts)} tensors of vectors read where they are"
    return Replacement({match.anchor: dots}, what, "the same vectors in the same order")


REWRITE = Rewrite(
    "dot_interaction",
    find_dots,
    replace_dots,
    why="before the repeated lanes, which pack loops over pairs, and before the columns, which write its vectors",
)
PARTS = Rewrite(
    "dot_interaction_parts",
    find_parts,
    replace_parts,
    why="after the columns, which write such a cat themselves where they can",
)
