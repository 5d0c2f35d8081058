"""Products of many vectors with a matrix each, on CUDA: batched products that other passes, or the model, have made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mlp.serves import MOST_GROUPED
from fxopt.patterns.contractions.pairs import Roles
from fxopt.patterns.contractions.reading import Reader
from fxopt.patterns.contractions.terms import Axis, Dim, Factor, Term
from fxopt.patterns.core import Match, Search
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import only_user
from fxopt.shape.sizes import is_float32, shape_of, static
from fxopt.shape.spelled import SPELLED, spelled
from fxopt.shape.view_operators import through
from fxopt.shape.view_steps import Contiguous, Permute, moved

aten = torch.ops.aten
_DEEPEST = 2  # a product by elements, and the batched product in it


@dataclass(frozen=True)
class Taken:
    """Lane l takes entry places[l] of the axis `entries` of `source`, or entry l where places is None."""

    source: Factor
    entries: Axis
    places: Node | None


def find_grouped_linears(search: Search) -> Iterator[Match]:
    """einsum("blk,lkn->bln"), times [B, L, N] or not, where vectors and matrices may be entries of larger tensors.

    Matches bind the term, its axes b, l, k and n, a Taken each for x, weight and y (None where there is no y), and the
    axes of each dim of the anchor.
    """
    reader, inside = Reader(search.aliases), set[Node]()
    for node in reversed(search.graph.nodes) if search.inference else ():
        if node.target not in SPELLED or node in inside or not _is_plain(node):
            continue
        for term in reader.terms(node, _DEEPEST):
            match = _match(node, term, search.aliases)
            if match is not None:
                inside.update(term.inside)
                yield match
                break


def _is_plain(node: Node) -> bool:
    call = spelled(node) if is_float32(node, "cuda") else None
    return call is not None and call.bias is None


def _match(node: Node, term: Term, aliases: Aliases) -> Match | None:
    for weight in reversed(term.factors):  # the right one of a product where sizes leave it open
        rest = [factor for factor in term.factors if factor is not weight]
        pairs: list[tuple[Factor, Factor | None]] = [(rest[0], None)] if len(rest) == 1 else []
        for x, y in pairs or itertools.permutations(rest, 2) if len(rest) < 3 else ():
            axes = _axes(term, x, weight, y)
            if axes is None:
                continue
            taken = [None if factor is None else _taken(factor, axes[1]) for factor in (x, weight, y)]
            reads = [read for each in taken if each is not None for read in (each.source.node, each.places) if read]
            if not any(map(aliases.edited, reads)):
                bound = dict(zip(("x", "weight", "y"), taken, strict=True))
                anchor, dims = in_order(node, term.dims, (axes[0], axes[1], axes[3]), aliases)
                return Match(anchor, {**bound, "dims": dims, "term": term, "axes": axes, "reads": reads})
    return None


def in_order(
    node: Node, dims: tuple[Dim, ...], axes: tuple[Axis, ...], aliases: Aliases
) -> tuple[Node, tuple[Dim, ...]]:
    """The last view behind a node that has these axes in order, and its dims; the node itself where there is none.

    Each view is all that reads the one before. To replace the last one leaves no copy that only changes strides.
    """
    found: tuple[Node, tuple[Dim, ...]] = node, dims
    while (user := only_user(node)) is not None:
        seen = through(user)
        behind = moved(dims, seen[1]) if seen is not None and not aliases.edited(user) else None
        if behind is None:
            break
        node, dims = user, behind
        if tuple(axis for dim in dims for axis in dim) == axes:
            found = node, dims
    return found


def _axes(term: Term, x: Factor, weight: Factor, y: Factor | None) -> tuple[Axis, ...] | None:
    """b, l, k and n, where the factors have no others."""
    roles = Roles.of(x.axes, weight.axes, term.axes)
    if any(len(axes) != 1 for axes in (roles.left, roles.batch, roles.inner, roles.right)):
        return None
    (b,), (lane,), (k,), (n,) = roles.left, roles.batch, roles.inner, roles.right
    if any({*each.axes} != {b, lane, n} for each in (term, y) if each is not None):
        return None
    if static(lane.size) is None or any((static(axis.size) or MOST_GROUPED + 1) > MOST_GROUPED for axis in (k, n)):
        return None
    return b, lane, k, n


def _taken(factor: Factor, lanes: Axis) -> Taken:
    """What an index_select along the lanes reads, past copies that only change strides."""
    factor, places, entries = _uncopied(factor), None, lanes
    node, dim = factor.node, factor.dims.index((lanes,)) if (lanes,) in factor.dims else None
    arguments: Any = node.args
    if node.target is aten.index_select.default and dim is not None and arguments[1] % len(factor.dims) == dim:
        source, _, places = arguments
        entries = Axis(shape_of(source)[dim])
        dims: list[Dim] = list(factor.dims)
        dims[dim] = (entries,)
        factor = _uncopied(Factor(source, tuple(dims)))
    return Taken(factor, entries, places)


def _uncopied(factor: Factor) -> Factor:
    while (found := through(factor.node)) is not None and isinstance(found[1], Contiguous | Permute):
        source, step = found
        order = step.order if isinstance(step, Permute) else range(len(factor.dims))
        dims = dict(zip(order, factor.dims, strict=True))
        factor = Factor(source, tuple(dims[at] for at in range(len(dims))))
    return factor
