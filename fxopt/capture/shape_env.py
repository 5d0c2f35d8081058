"""The symbol table of a trace: torch's ShapeEnv, less the guards that only choose strides."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

aten = torch.ops.aten

# Operators whose output sizes do not depend on which of two sizes is larger or whether one is 1. Inequalities that
# their fake implementations ask about (which convolution backend, view or copy) choose strides only, and are no guards.
_SIZES_BY_EQUALITY = frozenset(
    {
        aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum, aten.tensordot,
        aten.conv1d, aten.conv2d, aten.convolution, aten.scaled_dot_product_attention,
        aten.batch_norm, aten.gru, aten.lstm, aten.reshape, aten.view, aten.flatten, aten.contiguous, aten.clone,
    }
)  # fmt: skip


# Operators for which it matters whether a size is 0: they give other sizes, or an error that a rewrite might not give.
_SIZES_BY_EMPTINESS = frozenset(
    {
        aten.cat, aten.stack, aten.squeeze, aten.squeeze_, aten.arange,
        aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.aminmax, aten.median,
    }
)  # fmt: skip

# Operators that ask whether a size is 1 only to choose strides.
_STRIDES_BY_ONE = frozenset({aten.embedding_bag, aten._embedding_bag})


class TraceShapeEnv(ShapeEnv):
    """Answers some questions of fake implementations from the hints, without a guard: inequalities asked inside an
    operator of `_SIZES_BY_EQUALITY`, and whether something is empty, which elsewhere decides about strides and errors.

    Attributes:
        operator: the overload whose fake implementation runs now, None in the user's code.
        symbolic_len, gave_len: whether len(tensor) gives a symbolic size as x.shape[0] does, and whether one was given.
    """

    operator: Any = None
    symbolic_len = True
    gave_len = False

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(self.operator, "overloadpacket", None)
        if (
            isinstance(orig_expr, Relational)
            and _is_about_strides(packet, orig_expr)
            and not free_unbacked_symbols(orig_expr)
        ):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            equal = (isinstance(orig_expr, sympy.Eq) and answer) or (isinstance(orig_expr, sympy.Ne) and not answer)
            if not equal:
                return answer
        return super().evaluate_expr(orig_expr, *args, **kwargs)


def _is_about_strides(packet: Any, question: Relational) -> bool:
    if packet in _SIZES_BY_EQUALITY:
        return True
    if packet is None or not isinstance(question, (sympy.Eq, sympy.Ne)):
        return False
    if 0 in question.args:
        return packet not in _SIZES_BY_EMPTINESS
    return 1 in question.args and packet in _STRIDES_BY_ONE
