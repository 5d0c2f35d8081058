"""Linear (+ ReLU) through oneDNN, from the batch size on from which it was measured to be faster."""

from __future__ import annotations

import torch

from fxopt.kernels.linear.op import available, call, load, threshold
from fxopt.patterns.core import Match
from fxopt.patterns.linear import find_linears
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor, Rejected


def replace_linear(editor: Editor, match: Match) -> Replacement:
    bound = match.bound
    if not available():
        raise Rejected("this torch has no oneDNN linear")
    start = threshold(bound["K"], bound["N"], torch.get_num_threads())
    if start is None:
        raise Rejected(f"[*, {bound['K']}] x [{bound['K']}, {bound['N']}]: torch's BLAS is as fast on this machine")
    load()
    arguments = (bound["x"], bound["weight"], bound["bias"], bound["relu"], start)
    fused = editor.call(torch.ops.fxopt.linear.default, *arguments)
    fused.meta["bound"] = call
    what = f"[*, {bound['K']}] x [{bound['K']}, {bound['N']}] through oneDNN from batch {start} on"
    return Replacement({match.anchor: fused}, what, "fp32 with another order of additions, measured faster here")


REWRITE = Rewrite("linear", find_linears, replace_linear, why="after the columns, whose copies read its result")
