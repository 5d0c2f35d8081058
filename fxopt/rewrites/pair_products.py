"""Products and dots of field pairs on CUDA in one launch, `fxopt::gpu_pairs`: no vector is written once a pair."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.fx import Node

from fxopt.kernels.columns.plan import Column, Plan
from fxopt.kernels.interactions.cuda.pair_products import KERNEL, gpu_pairs, load
from fxopt.kernels.interactions.serves import MOST_FLOATS, MOST_MULTIPLIED, multiplies
from fxopt.patterns.core import Match
from fxopt.patterns.interactions.pair_products import find_pair_products
from fxopt.patterns.lookup_products import Products, find_lookup_products
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.lookup_products import kept, side, written
from fxopt.shape.sizes import Size, shape_of

aten = torch.ops.aten


def replace_pairs(editor: Editor, match: Match) -> Replacement:
    editor.needs(KERNEL)
    z, i, j, dots = (match.bound[name] for name in ("z", "i", "j", "dots"))
    value = _shaped(editor, _multiplied(editor, z, i, j, dots), shape_of(match.anchor))
    what = f"{_kind(dots)} of pairs of {shape_of(z)[1]} vectors in one launch"
    return Replacement({match.anchor: value}, what, "a sample's vectors are read once, and multiplied where they lie")


def replace_lookups(editor: Editor, match: Match) -> Replacement:
    editor.needs(KERNEL)
    columns, products, others = (match.bound[name] for name in ("columns", "products", "others"))
    plan = plan_in(editor.module, columns)
    left, right = ([_lookup(column) for column in side(plan, products, name)] for name in ("left", "right"))
    distinct, dim = _distinct(plan, products), products.parts[0].dim
    n, pairs = len(distinct), len(left)
    if n > pairs:
        raise Rejected(f"expected lookups that are repeated, found {n} distinct ones in {pairs} pairs")
    if not multiplies(n, dim):
        most = f"at most {MOST_FLOATS} floats in vectors of {MOST_MULTIPLIED}"
        raise Rejected(f"expected {most}, found {n} of {dim}")
    numbers = {lookup: number for number, lookup in enumerate(distinct)}
    i, j = (torch.tensor([numbers[each] for each in one], device="cpu") for one in (left, right))
    editor.point = columns  # what else it writes may be read before the products are
    rest = kept(plan, sorted(others))
    vectors = tuple(
        replace(column, output=len(others), offset=number * dim) for number, column in enumerate(distinct.values())
    )
    whole = Plan((*rest.columns, *vectors), (*rest.widths, n * dim), (*rest.dtypes, "float32"), plan.bad_ids)
    *same, rows = written(editor, columns, whole)
    z = editor.shaped(rows, [shape_of(rows)[0], n, dim])
    places = (editor.constant("pairs", each, match.anchor) for each in (i, j))
    value = _multiplied(editor, z, *places, products.dots)
    if products.total:
        value = editor.call(aten.sum.dim_IntList, value, [1], True)
    values = {others[number]: node for number, node in zip(sorted(others), same, strict=True)}
    values[match.anchor] = _shaped(editor, value, shape_of(match.anchor))
    what = f"{_kind(products.dots)} of {pairs} pairs of {n} lookups in one launch"
    return Replacement(values, what, "each row is looked up once, and multiplied where it lies")


def _multiplied(editor: Editor, z: Node, i: Node, j: Node, dots: bool) -> Node:
    load()
    call = editor.call(torch.ops.fxopt.gpu_pairs.default, z, i, j, dots)
    call.meta["bound"] = gpu_pairs
    return call


def _shaped(editor: Editor, value: Node, shape: tuple[Size, ...]) -> Node:
    return value if len(shape_of(value)) == len(shape) else editor.shaped(value, shape)


def _kind(dots: bool) -> str:
    return "dot products" if dots else "products"


def _distinct(plan: Plan, products: Products) -> dict[Column, Column]:
    """Each lookup that is multiplied, by the first column that does it, whose name an error then tells."""
    found: dict[Column, Column] = {}
    for column in plan.columns:
        if column.output in products.outputs:
            found.setdefault(_lookup(column), column)
    return found


def _lookup(column: Column) -> Column:
    """What a column looks up, wherever that goes."""
    return replace(column, output=0, offset=0, name="", table_name="")


REWRITE = Rewrite(
    "gpu_pairs", find_pair_products, replace_pairs, why="after field_index, whose selects it takes; before pointwise"
)
OF_LOOKUPS = Rewrite(
    "gpu_lookup_pairs",
    functools.partial(find_lookup_products, device="cuda"),
    replace_lookups,
    why="behind the columns, whose plans say which rows are multiplied; before pointwise",
)
