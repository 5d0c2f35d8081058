"""FBGEMM's quantized tables: the check of ids and the lookup in one pass, without the dispatcher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxopt.kernels.table_batched.op import OPERATORS, call_of
from fxopt.patterns.table_batched import find_table_batched
from fxopt.rewrites.framework import Editor, Match, Rejected, Replacement, Rewrite
from fxopt.shape.conditions import unless_bad

_GIVEN = ["dev_weights", "weights_tys", "weights_offsets", "rows", "D_offsets", "indices", "offsets", "indice_weights"]


def replace_table_batched(editor: Editor, match: Match) -> Replacement:
    if not OPERATORS.compiled():
        raise Rejected("its kernel could not be compiled")
    bound, anchor = match.bound, match.anchor
    pooling, alignment = bound["pooling_mode"], bound["row_alignment"]
    width = anchor.meta["val"].shape[1]
    if not isinstance(width, int):
        raise Rejected("the width of its result is not known")
    given = (*(bound[name] for name in _GIVEN), pooling, alignment, width)
    call = editor.known(anchor.meta["val"], torch.ops.fxopt.table_batched.default, *given)
    call.meta["bound"] = _or_eager(call_of(pooling, alignment, width))
    what = f"{bound['D_offsets'].meta['val'].shape[0] - 1} features of quantized tables, one call"
    return Replacement({anchor: call, bound["check"]: None}, what, "the same sums; ids are checked inside the lookup")


def _or_eager(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call that leaves bad ids to eager, which repairs them."""

    def fxopt_table_batched(*given: Tensor) -> Tensor:
        return unless_bad(call, *given)

    return fxopt_table_batched


REWRITE = Rewrite(
    "table_batched", find_table_batched, replace_table_batched, why="beside the columns, which are no such tables"
)
