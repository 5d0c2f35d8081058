"""Products of looked-up rows without the rows: `fxopt::lookup_products` in place of columns and what multiplies them.

On one thread without / with (without: in chunks of 256 rows): an ONN of 190 pairs, D = 8, 87 / 36 us at batch 1,
655 / 199 us at 256, 11.5 / 3.2 ms at 4096; an FFM of 325: 50 / 17 us, 429 / 157 us, 7.0 / 2.1 ms.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Node

from fxopt.kernels.columns import errors
from fxopt.kernels.columns.encode import encode
from fxopt.kernels.columns.plan import Column, Plan
from fxopt.kernels.lookup_products.op import call_of, load, setting_of
from fxopt.patterns.lookup_products import Products, find_lookup_products
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.rewrites.framework import MEASURED, Editor, Match, Rejected, Replacement, Rewrite

aten = torch.ops.aten


def replace_products(editor: Editor, match: Match) -> Replacement:
    columns, products = match.bound["columns"], match.bound["products"]
    editor.point = columns  # what else it writes may be read before the products are
    tensors, tables, _ = match.bound["arguments"]
    plan = plan_in(editor.module, columns)
    sides = [*side(plan, products, "left"), *side(plan, products, "right")]
    for table in (tables[column.table].meta["val"] for column in sides):
        if table.dtype != torch.float32 or table.stride(1) != 1:
            found = f"{table.dtype} with strides {tuple(table.stride())}"
            raise Rejected(f"expected a table of float32 whose rows lie side by side, found {found}")
    dim = products.parts[0].dim
    pairs = Plan(
        tuple(replace(column, output=0, offset=number * dim) for number, column in enumerate(sides)),
        (len(sides) * dim,),
        ("float32",),
        plan.bad_ids,
    )
    load()
    words, setting = encode(pairs), setting_of(pairs, products.dots)
    arguments = tensors, tables, editor.constant("plan", words), setting
    call = editor.call(torch.ops.fxopt.lookup_products.default, *arguments)
    call.meta["bound"], call.meta["rowwise"] = call_of(pairs, setting), columns.meta["rowwise"]
    value = editor.call(aten.sum.dim_IntList, call, [1], True) if products.total else call
    values = _others(editor, columns, plan, match.bound["others"])
    values[match.anchor] = editor.in_shape_of(match.anchor, value)
    kind = "dot products" if products.dots else "products"
    what = f"{len(sides) // 2} {kind} of two lookups, one call"
    return Replacement(values, what, "the rows are multiplied where they lie, and never written out")


def side(plan: Plan, products: Products, name: str) -> list[Column]:
    """The columns of the left or right factors, in the order of the products."""
    found: list[Column] = []
    for part in products.parts:
        output = getattr(part, name)
        vectors = [column for column in plan.columns if column.output == output]
        vectors.sort(key=lambda column: column.offset)
        places = [column.offset for column in vectors]
        if part.dim != products.parts[0].dim or places != list(range(0, part.pairs * part.dim, part.dim)):
            raise Rejected("its vectors are not lookups of one size, one beside the other")
        found += vectors
    if not all(map(_is_plain, found)):
        raise Rejected("its vectors are more than plain lookups")
    return found


def _is_plain(column: Column) -> bool:
    special = column.add or column.bag or column.weights or column.divisor or column.is_masked or column.wrap_negative
    plain = column.table is not None and column.pool == "none" and not special
    return plain and column.source.rows == (0,) and column.source.lane is None


def _others(editor: Editor, columns: Node, plan: Plan, others: dict[int, Node]) -> dict[Node, Node]:
    """What else the columns write, by a call of their own."""
    rest, outputs = plan.of([column for column in plan.columns if column.output in others])
    if rest is None:
        return {}
    return {others[output]: found for output, found in zip(outputs, written(editor, columns, rest), strict=True)}


def written(editor: Editor, columns: Node, plan: Plan) -> list[Node]:
    """The outputs of a call of columns by another plan."""
    call = editor.call(torch.ops.fxopt.columns.default, *columns.args[:2], editor.constant("plan", encode(plan)))
    call.meta["bound"], call.meta["rowwise"] = errors.call_of(plan), columns.meta["rowwise"]
    return [editor.call(operator.getitem, call, number) for number in range(len(plan.widths))]


REWRITE = Rewrite(
    "lookup_products",
    find_lookup_products,
    replace_products,
    policy=MEASURED,
    why="behind the columns, whose plans say which rows are multiplied",
)
