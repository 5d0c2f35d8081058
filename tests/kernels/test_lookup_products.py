"""fxopt::lookup_products: against fp64 on every instruction set, with the columns' programs and the columns' errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.errors import BadId
from fxopt.kernels.columns.plan import Column, Instr, Op, Plan, Source
from fxopt.kernels.lookup_products import op
from fxopt.kernels.words import tensor_of

ROWS = 50


def plan_of_pairs(pairs: int, dim: int, fields: int, tables: int, **special: object) -> Plan:
    """Pair p multiplies fields p and p + 1; tables are shared where there are fewer than columns."""
    columns = [
        Column(Source(0, fixed=((1, (p + side) % fields),)), (p + side * pairs) % tables, 0, 0, name=f"{'lr'[side]}{p}")
        for side in range(2)
        for p in range(pairs)
    ]
    placed = [Column(**vars(column) | {"offset": at * dim} | special) for at, column in enumerate(columns)]  # type: ignore[arg-type]
    return Plan(tuple(placed), (2 * pairs * dim,), ("float32",))


def products(ids: Tensor, tables: list[Tensor], plan: Plan, dots: bool = True) -> Tensor:
    setting = op.setting_of(plan, dots)
    return op.call_of(plan, setting)([ids], tables, encode(plan), setting)


def exact(ids: Tensor, tables: list[Tensor], plan: Plan, dots: bool) -> Tensor:
    pairs = len(plan.columns) // 2
    rows = [tables[c.table or 0].double()[ids[:, c.source.fixed[0][1]].long()] for c in plan.columns]
    products = [rows[p] * rows[pairs + p] for p in range(pairs)]
    return torch.stack([p.sum(1) for p in products], 1) if dots else torch.cat(products, 1)


SIZES = [
    (0, 4, 8),
    (1, 1, 1),
    (1, 190, 8),
    (3, 5, 3),
    (5, 17, 4),
    (259, 16, 8),
    (300, 33, 5),
    (7, 6, 70),
    (1100, 3, 16),
]


@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_is_products_of_rows(isa: None, sizes: tuple[int, int, int], dots: bool) -> None:
    batch, pairs, dim = sizes
    tables = [torch.randn(ROWS, dim) for _ in range(min(2 * pairs, 9))]
    tables[-1] = torch.randn(ROWS, dim + 3)[:, 1 : dim + 1]  # rows apart
    plan = plan_of_pairs(pairs, dim, 4, len(tables))
    encoded = encode(plan)
    for dtype in (torch.int64, torch.int32):
        ids = torch.randint(0, ROWS, (batch, 4), dtype=dtype)
        found, setting = products(ids, tables, plan, dots), op.setting_of(plan, dots)
        assert found.is_contiguous() and found.shape == (batch, pairs if dots else pairs * dim)
        torch.testing.assert_close(found.double(), exact(ids, tables, plan, dots), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.ops.fxopt.lookup_products([ids], tables, encoded, setting), found)


def test_a_row_is_the_same_in_every_batch(isa: None) -> None:
    tables, plan = [torch.randn(ROWS, 12) for _ in range(6)], plan_of_pairs(3, 12, 4, 6)
    ids = torch.randint(0, ROWS, (9, 4))
    whole = products(ids, tables, plan)
    assert torch.equal(torch.cat([products(row, tables, plan) for row in ids.split(1)]), whole)


def test_blocks_of_rows_and_threads(isa: None) -> None:
    tables, plan = [torch.randn(ROWS, 2) for _ in range(4)], plan_of_pairs(19, 2, 5, 4)
    ids, threads = torch.randint(0, ROWS, (2 * 8192 + 7, 5)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = products(ids, tables, plan)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found.double(), exact(ids, tables, plan, True), rtol=1e-5, atol=1e-5)


def test_padding_is_a_row_like_others(isa: None) -> None:
    tables, plan = [torch.randn(ROWS, 8) for _ in range(4)], plan_of_pairs(4, 8, 4, 4, frozen=3)
    ids = torch.full((5, 4), 3)
    words = tensor_of(op.setting_of(plan, True))
    (found,) = op.OPERATORS.past_dispatcher("lookup_products")([ids], tables, encode(plan), words)
    torch.testing.assert_close(found.double(), exact(ids, tables, plan, True), rtol=1e-5, atol=1e-5)


def test_programs_and_large_tables(isa: None) -> None:
    tables = [torch.randn(20_000, 8) for _ in range(2)]
    plan = plan_of_pairs(4, 8, 4, 2, program=(Instr(Op.REMAINDER, "int64", 20_000),))
    ids = torch.randint(0, 10**9, (600, 4))
    found = products(ids, tables, plan)
    torch.testing.assert_close(found.double(), exact(ids % 20_000, tables, plan, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("column", "bad"), [(0, ROWS), (5, -1), (2, 2**40)])
def test_bad_ids_name_their_column(isa: None, column: int, bad: int) -> None:
    op.load()  # also the columns, which name the id
    tables, plan = [torch.randn(ROWS, 8) for _ in range(6)], plan_of_pairs(3, 8, 9, 6)
    ids = torch.randint(0, ROWS, (300, 9))
    ids[270, plan.columns[column].source.fixed[0][1]] = bad
    with pytest.raises(BadId, match=f"id {bad} at row 270 is outside table"):
        products(ids, tables, plan)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tables_that_the_kernel_does_not_read(dtype: torch.dtype) -> None:
    op.load()
    tables, plan = [torch.randn(ROWS, 4, dtype=dtype) for _ in range(4)], plan_of_pairs(2, 4, 3, 4)
    ids = torch.randint(0, ROWS, (6, 3))
    found = products(ids, tables, plan)
    torch.testing.assert_close(found.double(), exact(ids, tables, plan, True), rtol=1e-2, atol=1e-2)


def test_strided_tables() -> None:
    op.load()
    tables, plan = [torch.randn(4, ROWS).t() for _ in range(4)], plan_of_pairs(2, 4, 3, 4)
    ids = torch.randint(0, ROWS, (6, 3))
    found = products(ids, tables, plan)
    torch.testing.assert_close(found.double(), exact(ids, tables, plan, True), rtol=1e-5, atol=1e-5)
