"""What the generic rooms know of fxopt's own operators: each declares it in its own folder, and no list names them.

`fxopt/kernels/operators.py` records the facts when an operator is defined. A graph cannot call it earlier, so whoever
reads a graph finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True)
class Facts:
    """What is known of one operator; the defaults say that nothing is.

    Attributes:
        rows: how row b of a result depends on row b of the arguments (fxopt/shape/row_rules.py has a rule for each
            word): "first", all that has rows has them in its first dim; "layers", linear layers over the last dim;
            "axes", meta["axes"] of the call says it; "", rows may mix, unless meta["rowwise"] of the call says "first".
        overwritable: its results are memory of the call alone, which what reads them last may write over.
        looks_up: it reads rows of tables, which the report counts as embedding columns.
        clamps: from its argument `plan`, whether a call moves ids outside their table into it, and counts them.
        decides: from its argument `plan`, the numbers of its first list's tensors that ids are computed from.
        padded: from its argument `plan`, the plan to use where rows are added to fill up a batch. None: the same one.
        needs_result: from its argument `plan`, whether its backward needs what the call gave. What is registered with
            torch may not show it: where gradients are recorded, a call may go past the dispatcher.
        keeps: it keeps what it derives from an argument until that changes, which a replayed CUDA graph would not see.
    """

    rows: Literal["", "first", "layers", "axes"] = ""
    overwritable: bool = False
    looks_up: bool = False
    clamps: Callable[[Tensor], bool] | None = None
    decides: Callable[[Tensor], set[int]] | None = None
    padded: Callable[[Tensor], Tensor] | None = None
    needs_result: Callable[[Sequence[int]], bool] | None = None
    keeps: bool = False


UNKNOWN = Facts()
_declared: dict[str, Facts] = {}


def declare(name: str, facts: Facts) -> None:
    """Records the facts of the operator fxopt::`name`."""
    _declared[f"fxopt::{name}"] = facts


def facts_of(target: object) -> Facts:
    """The facts of what a node calls; the defaults where it is no operator of fxopt."""
    return _declared.get(target.name(), UNKNOWN) if isinstance(target, OpOverload) else UNKNOWN
