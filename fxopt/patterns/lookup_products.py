"""Products of looked-up rows, pair by pair, that nobody reads in any other form."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.shape.calls import closure
from fxopt.shape.sizes import is_float32, same, same_shape, shape_of, static
from fxopt.shape.view_operators import REGROUPS, joined_dim

aten = torch.ops.aten
FEWEST = 4  # pairs; fewer fit in the cache
_READS = {aten.mul.Tensor, aten.sum.dim_IntList, aten.cat.default}
Outer = Mapping[Node, Node]  # of a function's parameters to the nodes that it is called with


@dataclass(frozen=True)
class Product:
    """`pairs` vectors of `dim` floats, by as many others. left, right: the numbers of the columns' outputs."""

    left: int
    right: int
    pairs: int
    dim: int


@dataclass(frozen=True)
class Products:
    """Row by row one after the other in the anchor. dots: each is summed over its vector; total: and then all are."""

    parts: tuple[Product, ...]
    dots: bool
    total: bool

    @property
    def outputs(self) -> set[int]:
        """The numbers of the columns' outputs that are multiplied."""
        return {number for part in self.parts for number in (part.left, part.right)}


class _Other(Exception):
    """Something else than a product of looked-up rows."""


def find_lookup_products(search: Search, device: str = "cpu") -> Iterator[Match | Reject]:
    """Matches bind the `columns` call, its arguments (`reads`), the `products`, and the call's `others` outputs."""
    for columns in calls_of_ours(search.graph, "fxopt::columns") if search.inference else ():
        found = list(_products(columns)) if columns.all_input_nodes[0].meta["val"].device.type == device else []
        if not found:
            continue
        aliases = search.aliases
        outputs = {int(user.args[1]): user for user in columns.users}  # type: ignore[arg-type]
        whole = ((anchor, each) for anchor, each in found if _read_rows_alone(anchor, each, outputs))
        anchor, products = next(whole, found[0])
        if edited := next(filter(aliases.edited, (*columns.all_input_nodes, *outputs.values())), None):
            yield Reject(f"'{edited.name}' is edited in place", anchor)
        elif not _read_rows_alone(anchor, products, outputs):
            yield Reject("the looked-up rows are read elsewhere too", anchor)
        elif (pairs := sum(part.pairs for part in products.parts)) < FEWEST:
            yield Reject(f"expected at least {FEWEST} pairs of rows, found {pairs}", anchor)
        else:
            others = {number: node for number, node in outputs.items() if number not in products.outputs}
            arguments = list(columns.args)
            yield Match(anchor, {"columns": columns, "arguments": arguments, "products": products, "others": others})


def _products(columns: Node) -> Iterator[tuple[Node, Products]]:
    """What is computed of this call's rows, the last of it first."""
    behind = set[Node]()
    for node in columns.graph.nodes:
        if node is columns or behind.intersection(node.all_input_nodes):
            behind.add(node)
    for node in reversed(columns.graph.nodes):
        if node not in behind or not (node.target in _READS or "function" in node.meta):
            continue
        terms = _terms(node)
        try:
            parts = list(_parts(terms or node, columns, {}))
        except _Other:
            continue
        kinds = {dots or terms is not None for dots, _ in parts}
        if len(kinds) == 1:
            yield node, Products(tuple(product for _, product in parts), kinds.pop(), terms is not None)


def _terms(node: Node) -> Node | None:
    """The tensor of which a node sums all that is in a row, by one sum or two."""
    dims: list[int] = []
    for _ in range(2):
        source = node.args[0] if node.args else None
        if node.target is not aten.sum.dim_IntList or node.kwargs or not isinstance(source, Node):
            return None
        if dims and len(node.args) > 2:  # it keeps the dims that it sums
            return None
        rank = len(shape_of(source))
        summed = [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
        kept = [dim for dim in range(rank) if dim not in summed]
        dims = summed + [kept[dim] for dim in dims]
        if sorted(dims) == list(range(1, rank)) and rank > 2:
            return source
        node = source
    return None


def _parts(node: Node, columns: Node, outer: Outer) -> Iterator[tuple[bool, Product]]:
    """(whether it is summed, product): what lies one after the other in each row of a tensor."""
    node = _regrouped(outer.get(node, node))
    if function := node.meta.get("function"):
        yield from _in_function(function, node, columns, outer)
    elif node.target is aten.cat.default and _joins_rows(node):
        for operand in node.args[0]:  # type: ignore[union-attr]
            yield from _parts(operand, columns, outer)  # type: ignore[arg-type]
    elif sums_vectors(node):
        yield True, _product(node.args[0], columns, outer)  # type: ignore[arg-type]
    else:
        yield False, _product(node, columns, outer)


def sums_vectors(node: Node) -> bool:
    """Whether it sums over the last dim alone, and may keep that."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    source, dims, *_ = node.args
    rank = len(shape_of(source))  # type: ignore[arg-type]
    return [dim % rank for dim in dims or ()] == [rank - 1]  # type: ignore[operator,union-attr]


def _in_function(function: Graph, call: Node, columns: Node, outer: Outer) -> Iterator[tuple[bool, Product]]:
    (output,) = function.find_nodes(op="output")
    given = [outer.get(node, node) for node in call.all_input_nodes]
    parameters = function.find_nodes(op="placeholder")
    yield from _parts(output.args[0], columns, dict(zip(parameters, given, strict=True)))  # type: ignore[arg-type]


def _product(node: Node, columns: Node, outer: Outer) -> Product:
    if node.target is not aten.mul.Tensor or not is_float32(node) or len(shape_of(node)) < 3:
        raise _Other
    *sizes, dim = (static(size) for size in shape_of(node)[1:])
    left, right = (_output(operand, node, columns, outer) for operand in node.args)
    if None in sizes or not dim:
        raise _Other
    return Product(left, right, math.prod(size or 0 for size in sizes), dim)


def _output(operand: object, product: Node, columns: Node, outer: Outer) -> int:
    """The number of the columns' output that an operand of the product's own sizes and dtype is."""
    if not is_float32(operand) or not same_shape(operand, product):
        raise _Other
    operand = _regrouped(outer.get(operand, operand))
    if operand.target is not operator.getitem or operand.args[0] is not columns:
        raise _Other
    return int(operand.args[1])  # type: ignore[arg-type]


def _regrouped(node: Node) -> Node:
    """What a tensor is but for the sizes within a row."""
    while node.target in REGROUPS or _keeps_order(node):
        source = node.args[0]
        if not isinstance(source, Node) or not same(shape_of(source)[0], shape_of(node)[0]):
            raise _Other
        node = source
    return node


def _keeps_order(node: Node) -> bool:
    """Whether it is a permutation that moves dims of size 1 alone."""
    if node.target is not aten.permute.default:
        return False
    sizes, order = shape_of(node.args[0]), node.args[1]  # type: ignore[arg-type]
    moved = [dim % len(sizes) for dim in order if static(sizes[dim]) != 1]  # type: ignore[union-attr,operator,index]
    return moved == sorted(moved)


def _joins_rows(cat: Node) -> bool:
    """Whether it puts rows of its operands one behind the other."""
    dim = joined_dim(cat)
    return dim > 0 and all(static(size) == 1 for size in shape_of(cat)[1:dim])


def _read_rows_alone(anchor: Node, products: Products, outputs: Mapping[int, Node]) -> bool:
    return all(_ends_in(outputs[number], anchor) for number in products.outputs)


def _ends_in(node: Node, anchor: Node) -> bool:
    """Whether nobody but the anchor needs a node."""
    readers = closure([node], lambda read: read.users.keys() - {anchor})
    return all(reader.op != "output" for reader in readers)
