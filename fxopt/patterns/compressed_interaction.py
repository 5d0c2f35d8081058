"""Linear maps of the products of two sets of vectors, as compressed interaction networks (xDeepFM) write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxopt.patterns.contractions.convolutions import CONVOLUTIONS
from fxopt.patterns.contractions.reading import Reader
from fxopt.patterns.contractions.terms import Dim, Factor, Term
from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.linear_layers import activated
from fxopt.shape.sizes import static
from fxopt.shape.spelled import SPELLED, spelled


def find_compressed_interactions(search: Search) -> Iterator[Match | Reject]:
    """einsum("bhd,bmd,ohm->bod"): an outer product, a reshape and conv1d of kernel 1, or a linear over the products."""
    reader = Reader(search.aliases)
    for node in search.graph.nodes:
        if node.target not in SPELLED or node.target is torch.ops.aten.mul.Tensor or not _is_plain(node):
            continue
        ended = search.inference and node.meta["val"].is_cuda
        found = (_match(node, term, ended) for term in reader.terms(node, deepest=3) if len(term.factors) == 3)
        yield from itertools.islice(filter(None, found), 1)


def _match(node: Node, term: Term, ended: bool) -> Match | None:
    """ended: with the bias and a ReLU behind it, as the operator for GPUs takes them."""
    for x, y, weight in itertools.permutations(term.factors):
        groups = _groups(term, x, y, weight)
        if groups is not None:
            call = spelled(node)
            bias = call.bias[0] if call is not None and call.bias is not None else None
            bound: dict[str, Any] = {"term": term, "x": x, "y": y, "weight": weight, "groups": groups, "bias": bias}
            user, activation = activated(node)
            relu = ended and activation == "relu"
            bound |= {"ended": ended, "relu": relu, "tensors": (x.node, y.node, weight.node)}
            return Match(user if relu else node, bound)
    return None


def _is_plain(node: Node) -> bool:
    """On a GPU the operator has the precision that torch lets convolutions have."""
    value = node.meta["val"]
    return node.target in CONVOLUTIONS if value.is_cuda else value.dtype == torch.float32


def _groups(term: Term, x: Factor, y: Factor, weight: Factor) -> dict[str, Dim] | None:
    """The axes b, d, h, m and o, where the factors have no others, and h comes before m in the weight."""
    role = {"110": "s", "101": "h", "011": "m", "001": "o"}
    found: dict[str, list] = {"s": [], "h": [], "m": [], "o": []}
    for axis in dict.fromkeys((*weight.axes, *term.axes, *x.axes, *y.axes)):
        kind = role.get("".join(str(int(axis in factor.axes)) for factor in (x, y, weight)))
        if kind is None or (axis in term.axes) != (kind in "so"):
            return None
        found[kind].append(axis)
    order = [axis for axis in weight.axes if axis not in found["o"]]
    if order != found["h"] + found["m"] or not (found["h"] and found["m"]) or len(found["s"]) not in (1, 2):
        return None
    if any(static(axis.size) is None for axis in weight.axes):
        return None
    b, *d = found["s"]
    return {"b": (b,), "d": tuple(d), **{letter: tuple(found[letter]) for letter in "hmo"}}
