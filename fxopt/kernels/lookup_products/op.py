"""fxopt::lookup_products: products and dot products of pairs of looked-up rows, which are never written out.

What field-aware models do with a table for each pair of fields (FFM: Juan et al., RecSys 2016; ONN: Yang et al.,
arXiv:1904.12579). 190 pairs of 380 tables of 1000 x 8, batch 4096, one thread: 1.1 ms, the rows written first 30 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxopt.facts import Facts

from ..columns import op as columns_op
from ..columns.encode import decides, plan_of
from ..columns.errors import explain
from ..columns.plan import Plan
from ..operators import Operator, Operators, cpu_library
from ..words import tensor_of, text_of, words_in

_SCHEMA = "lookup_products(Tensor[] tensors, Tensor[] tables, Tensor plan, str setting) -> Tensor"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "products.h", (_SCHEMA,))


def lookup_products(tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor, setting: str) -> Tensor:
    """`fxopt::columns`, then the products: the definition in PyTorch.

    Args:
        tensors, tables, plan: as of fxopt::columns, with one output of 2 P plain lookups of D floats each.
        setting: of :func:`setting_of`.

    Returns:
        [B, P] or [B, P * D], contiguous: pair p are columns p and P + p.

    Raises:
        RuntimeError: as fxopt::columns.
    """
    (rows,) = torch.ops.fxopt.columns.default(tensors, tables, plan)
    left, right = rows.unflatten(1, (2, *_pairs(tables, plan))).unbind(1)
    return (left * right).sum(2) if _sums_up(setting) else (left * right).flatten(1)


def setting_of(plan: Plan, dots: bool) -> str:
    """Whether products are summed over D, and for each column a number: columns with one number read the same ids."""
    numbers: dict[object, int] = {}
    keys = [(column.source, repr(column.program)) for column in plan.columns]  # 0.0 == -0.0
    return text_of([int(dots), *(numbers.setdefault(key, len(numbers)) for key in keys)])


def call_of(plan: Plan, setting: str) -> Callable[..., Tensor]:
    """`lookup_products` for one plan, past the dispatcher where it can be, with its errors explained."""
    words = tensor_of(setting)

    def fxopt_lookup_products(
        tensors: Sequence[Tensor], tables: Sequence[Tensor], encoded: Tensor, setting: str
    ) -> Tensor:
        try:
            outputs = OPERATORS.past_dispatcher("lookup_products")(tensors, tables, encoded, words)
            if outputs is not None:
                return outputs[0]
        except RuntimeError:
            pass  # tables that the kernel does not read; or the columns say which id of which one is outside
        try:
            return lookup_products(tensors, tables, encoded, setting)
        except RuntimeError as error:
            raise explain(error, plan) or error from None

    return fxopt_lookup_products


def _fake(tensors: list[Tensor], tables: list[Tensor], plan: Tensor, setting: str) -> Tensor:
    (rows,) = torch.ops.fxopt.columns(tensors, tables, plan)
    pairs, dim = _pairs(tables, plan)
    return rows.new_empty(rows.shape[0], pairs if _sums_up(setting) else pairs * dim)


def _sums_up(setting: str) -> bool:
    return bool(words_in(setting)[0])


def _pairs(tables: Sequence[Tensor], plan: Tensor) -> tuple[int, int]:
    """P and D."""
    columns = plan_of(plan).columns
    assert columns[0].table is not None
    return len(columns) // 2, tables[columns[0].table].shape[1]


OPERATORS = Operators((Operator(_SCHEMA, lookup_products, _fake, facts=Facts(looks_up=True, decides=decides)),), KERNEL)


def load() -> None:
    """Defines the operator and that of the columns."""
    columns_op.load()
    OPERATORS.load()
