"""Mixtures of experts on CUDA: a softmax over each row's logits weighs the rows of experts that stand side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.kernels.mixtures.serves import MOST_WEIGHTS, mixes
from fxopt.patterns.contractions.reading import Reader
from fxopt.patterns.contractions.terms import Axis, Dim, Factor, Term
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.grouped_linears import in_order
from fxopt.patterns.groups import alike
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, is_float32, shape_of, static
from fxopt.shape.spelled import SPELLED
from fxopt.shape.view_operators import joined_dim

aten = torch.ops.aten
_DEEPEST = 1  # a sum, and the product by elements in it


@dataclass(frozen=True)
class Mixture:
    """`term`, whose axes are rows and channels: the softmax of the logits times the experts, in order.

    anchor: what is replaced, with `dims`: the term's last operator, or a view behind it.
    """

    anchor: Node
    dims: tuple[Dim, ...]
    term: Term
    logits: Factor
    experts: tuple[Factor, ...]

    @property
    def reads(self) -> list[Node]:
        return [self.logits.node, *(expert.node for expert in self.experts)]


def find_mixtures(search: Search) -> Iterator[Match | Reject]:
    """einsum("bk,bkd->bd") of a softmax over k and a stack or a cat of K experts, however it is spelled.

    Matches bind the `mixtures` of one call, and all `nodes` that it reads.
    """
    mixtures = list[Mixture]()
    for node in search.graph.nodes if search.inference else ():
        if (found := _mixture(node, search.aliases)) is None:
            continue
        if edited := next(filter(search.aliases.edited, found.reads), None):
            yield Reject(f"'{edited.name}' is edited in place", node)
        else:
            mixtures.append(found)
    for together in alike(search, mixtures, _key):
        yield from map(_match, _launches(together))


def _key(mixture: Mixture) -> object:
    rows, channels = mixture.term.axes
    return expression(rows.size), channels.size, mixture.anchor.meta["val"].device


def _match(mixtures: list[Mixture]) -> Match:
    nodes = [node for mixture in mixtures for node in (mixture.anchor, *mixture.reads)]
    return Match(min(mixture.anchor for mixture in mixtures), {"mixtures": mixtures, "nodes": nodes})


def _launches(together: Sequence[Mixture]) -> Iterator[list[Mixture]]:
    """As many as one launch takes, again and again."""
    some: list[Mixture] = []
    for mixture in together:
        if not mixes(len(some) + 1, len({expert.node for each in (*some, mixture) for expert in each.experts})):
            yield some
            some = []
        some.append(mixture)
    yield some


def _mixture(node: Node, aliases: Aliases) -> Mixture | None:
    if node.target not in SPELLED or not is_float32(node, "cuda"):
        return None
    for term in Reader(aliases).terms(node, _DEEPEST):
        if len(term.factors) != 2:
            continue
        for weights, stacked in (term.factors, term.factors[::-1]):
            if (axes := _axes(term, weights, stacked)) is None:
                continue
            logits, experts = _logits(weights, axes[1]), _experts(stacked, axes)
            if logits is not None and len(experts) == axes[1].size:
                return Mixture(*in_order(node, term.dims, term.axes, aliases), term, logits, experts)
    return None


def _axes(term: Term, weights: Factor, stacked: Factor) -> tuple[Axis, Axis, Axis] | None:
    """b, k and d, where the sizes of k and d are known, and fit."""
    if len(term.axes) != 2 or len(weights.axes) != 2 or len(stacked.axes) != 3:
        return None
    (b, d), k = term.axes, weights.axes[1]
    many = static(k.size) or MOST_WEIGHTS + 1
    fits = 1 < many <= MOST_WEIGHTS and static(d.size) is not None
    return (b, k, d) if fits and weights.axes == (b, k) and {*stacked.axes} == {b, k, d} else None


def _logits(weights: Factor, k: Axis) -> Factor | None:
    """What the weights are the softmax of, if that goes over `k`."""
    node, arguments = weights.node, tuple[Any, ...](weights.node.args)
    if node.target is not aten.softmax.int or node.kwargs or any(arguments[2:]):
        return None
    logits, dim = arguments[:2]
    return Factor(logits, weights.dims) if weights.dims[dim] == (k,) and is_float32(logits, "cuda") else None


def _experts(stacked: Factor, axes: tuple[Axis, Axis, Axis]) -> tuple[Factor, ...]:
    """The experts that a stack or a cat has side by side; none where it is something else."""
    if stacked.node.target not in (aten.stack.default, aten.cat.default):
        return ()
    b, k, d = axes
    pieces: Any = stacked.node.args[0]
    dim = joined_dim(stacked.node)
    before, joined, behind = stacked.dims[:dim], stacked.dims[dim], stacked.dims[dim + 1 :]
    if joined[:1] != (k,):
        return ()
    own = () if stacked.node.target is aten.stack.default else (joined[1:],)
    dims = (*before, *own, *behind)
    experts = tuple(Factor(piece, dims) for piece in pieces)
    fits = all(is_float32(piece, "cuda", len(dims)) for piece in pieces)
    sizes = not own or all(static(shape_of(piece)[dim]) == (d.size if joined[1:] else 1) for piece in pieces)
    return experts if fits and sizes and experts[0].axes == (b, d) else ()
