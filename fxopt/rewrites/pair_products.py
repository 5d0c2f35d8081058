"""Products and dots of field pairs on CUDA in one launch, `fxopt::gpu_pairs`: no vector is written once a pair."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from fxopt.kernels.columns.plan import Column, Plan
from fxopt.kernels.interactions.cuda.pair_products import OPERATORS, gpu_pairs
from fxopt.kernels.interactions.serves import MOST_FLOATS, MOST_MULTIPLIED, multiplies
from fxopt.patterns.interactions.pair_products import find_pair_products
from fxopt.patterns.lookup_products import Products, find_lookup_products
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.rewrites.framework import Editor, Match, Rejected, Replacement, Rewrite
from fxopt.rewrites.lookup_products import side, written
from fxopt.shape.sizes import shape_of

aten = torch.ops.aten


def replace_pairs(editor: Editor, match: Match) -> Replacement:
    z, i, j, dots = (match.bound[name] for name in ("z", "i", "j", "dots"))
    value = editor.ours(OPERATORS, "gpu_pairs", gpu_pairs, z, i, j, dots)
    value = editor.in_shape_of(match.anchor, value)
    what = f"{_kind(dots)} of pairs of {shape_of(z)[1]} vectors in one launch"
    return Replacement({match.anchor: value}, what, "a sample's vectors are read once, and multiplied where they lie")


def replace_lookups(editor: Editor, match: Match) -> Replacement:
    columns, products, others = (match.bound[name] for name in ("columns", "products", "others"))
    plan = plan_in(editor.module, columns)
    left, right = ([_lookup(column) for column in side(plan, products, name)] for name in ("left", "right"))
    once, numbers = _once(plan, products, sorted(others))
    n, dim = len(numbers), products.parts[0].dim
    all_of_them = sum(column.output in products.outputs for column in plan.columns)
    if 2 * n > all_of_them:
        raise Rejected(f"expected lookups that are repeated, found {n} distinct ones of {all_of_them}")
    if not multiplies(n, dim):
        most = f"at most {MOST_FLOATS} floats in vectors of at most {MOST_MULTIPLIED}"
        raise Rejected(f"expected {most}, found {n} of {dim}")
    editor.point = columns  # what else it writes may be read before the products are
    *same, rows = written(editor, columns, once)
    z = editor.shaped(rows, [shape_of(rows)[0], n, dim])
    indices = (torch.tensor([numbers[each] for each in one], device="cpu") for one in (left, right))
    i, j = (editor.constant("pairs", each, match.anchor) for each in indices)
    value = editor.ours(OPERATORS, "gpu_pairs", gpu_pairs, z, i, j, products.dots)
    if products.total:
        value = editor.call(aten.sum.dim_IntList, value, [1], True)
    values = {others[output]: node for output, node in zip(sorted(others), same, strict=True)}
    values[match.anchor] = editor.in_shape_of(match.anchor, value)
    what = f"{_kind(products.dots)} of {len(left)} pairs of {n} lookups in one launch"
    return Replacement(values, what, "each row is looked up once, and multiplied where it lies")


def _once(plan: Plan, products: Products, others: Sequence[int]) -> tuple[Plan, dict[Column, int]]:
    """The plan of these others and, as its last output, of each lookup that is multiplied once; and their numbers.

    Columns stay in order, so that of many that read a bad id the same one is named.
    """
    outputs = {output: number for number, output in enumerate(others)}
    columns, numbers, dim = list[Column](), dict[Column, int](), products.parts[0].dim
    for column in plan.columns:
        if column.output in outputs:
            columns.append(replace(column, output=outputs[column.output]))
        elif column.output in products.outputs and (lookup := _lookup(column)) not in numbers:
            columns.append(replace(column, output=len(others), offset=len(numbers) * dim))
            numbers[lookup] = len(numbers)
    widths = (*(plan.widths[output] for output in others), len(numbers) * dim)
    dtypes = (*(plan.dtypes[output] for output in others), "float32")
    return Plan(tuple(columns), widths, dtypes, plan.bad_ids), numbers


def _kind(dots: bool) -> str:
    return "dot products" if dots else "products"


def _lookup(column: Column) -> Column:
    """What a column looks up, wherever that goes and whatever it is called."""
    return replace(column, output=0, offset=0, name="", table_name="")


OF_LOOKUPS = Rewrite(
    "gpu_lookup_pairs",
    functools.partial(find_lookup_products, device="cuda"),
    replace_lookups,
    why="behind the columns, whose plans say which rows are multiplied; before crosses, which takes products too",
)
REWRITE = Rewrite(
    "gpu_pairs",
    find_pair_products,
    replace_pairs,
    why="after field_index, whose selects it takes, and gpu_lookup_pairs, whose products it sums; before crosses",
)
