"""Masks over fields as lists of fields, with a size that no longer depends on data.

FuxiCTR takes the triangle of its inner products by masked_select(x, mask) with a buffer, which expands the mask over
the batch and counts it: 3.4 ms for [256, 27, 28, 4] where index_select takes 0.2, and the sizes of all that follows are
known only when it has run.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.kernels.field_index.op import OPERATORS, places_of
from fxopt.patterns.masked_fields import Selected, find_masked_fields
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.shape.sizes import Size, product, shape_of

aten = torch.ops.aten


def replace_mask(editor: Editor, match: Match) -> Replacement:
    selected, count = match.bound["selected"], match.bound["count"]
    x, first, last = selected.x, selected.first, selected.last
    pairs = last == first + 1 == 2 and len(shape_of(x)) == 3
    mask = _over_fields(editor, selected, pairs)
    places = editor.ours(OPERATORS, "mask_places", places_of(), mask, count)
    lists = [editor.call(aten.select.int, places, 0, dim) for dim in range(2 if pairs else 1)]
    if pairs:
        value = editor.call(aten.index.Tensor, x, [None, *lists])
    else:
        joined = editor.call(aten.flatten.using_ints, x, first, last) if last > first else x
        value = editor.call(aten.index_select.default, joined, first, lists[0])
    known: Size = product(shape_of(value)) if selected.flat else count
    if selected.flat:
        value = editor.call(aten.reshape.default, value, [-1])
    equal = (shape_of(match.anchor)[0 if selected.flat else first], known)
    why = "compared with the last one at each call"
    return Replacement({match.anchor: value}, "a mask over fields into a list of them", why, (equal,))


def _over_fields(editor: Editor, selected: Selected, pairs: bool) -> Node:
    """The mask over exactly the dims it selects from; as one dim where the list is to be one of numbers."""
    mask = editor.call(aten.reshape.default, selected.mask, selected.own)
    if selected.own != selected.over:
        mask = editor.call(aten.expand.default, mask, selected.over)
    return mask if pairs else editor.call(aten.reshape.default, mask, [-1])


REWRITE = Rewrite(
    "masked_fields",
    find_masked_fields,
    replace_mask,
    why="in front of the dead checks: what was asked of a size that is known now is one of them",
)
