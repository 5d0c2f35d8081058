"""The symbol table of a trace: torch's ShapeEnv, less the guards that only choose strides."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

aten = torch.ops.aten

# Operators whose output sizes do not depend on which of two sizes is larger or whether one is 1. Inequalities that
# their fake implementations ask about (which convolution backend, view or copy) choose strides only, and are no guards.
_SIZES_BY_EQUALITY = frozenset(
    {
        aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum, aten.tensordot,
        aten.conv1d, aten.conv2d, aten.convolution, aten.scaled_dot_product_attention,
        aten.reshape, aten.view, aten.flatten, aten.contiguous, aten.clone,
    }
)  # fmt: skip


class TraceShapeEnv(ShapeEnv):
    """Answers an inequality asked inside an operator of `_SIZES_BY_EQUALITY` from the hints, without a guard.

    Attributes:
        operator: the overload whose fake implementation runs now, None in the user's code.
    """

    operator: Any = None

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(self.operator, "overloadpacket", None)
        if packet in _SIZES_BY_EQUALITY and not free_unbacked_symbols(orig_expr):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            equality = (isinstance(orig_expr, sympy.Eq) and answer) or (isinstance(orig_expr, sympy.Ne) and not answer)
            if isinstance(orig_expr, sympy.core.relational.Relational) and not equality:
                return answer
        return super().evaluate_expr(orig_expr, *args, **kwargs)
