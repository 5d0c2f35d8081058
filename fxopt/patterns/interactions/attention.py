"""Attentional factorization machines: an MLP scores the products of pairs, a softmax weighs them, a sum pools them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.interactions import movement, products
from fxopt.patterns.interactions.dots import joint_vectors, numbered
from fxopt.patterns.interactions.terms import Terms
from fxopt.shape.sizes import is_float32, shape_of, static
from fxopt.shape.spelled import spelled
from fxopt.shape.view_operators import viewed

aten = torch.ops.aten
_FEWEST_PAIRS = 3


@dataclass(frozen=True)
class Affine:
    """x @ weight (+ bias), or x @ weight.T where not `turned`; x [B, P, K]."""

    x: Node
    weight: Node
    turned: bool
    bias: Node | None = None


def find_attention(search: Search) -> Iterator[Match | Reject]:
    """softmax(query(relu(hidden(p))), pairs), and the sum of p that it weighs; p are the products of pairs."""
    if search.changes_modes:
        return
    terms = Terms(search.aliases, movement.RULES | products.RULES)
    for softmax in search.calls(aten.softmax.int):
        query = _scores(softmax)
        hidden = _affine(_relu(query.x)) if query is not None else None
        if query is None or hidden is None or static(shape_of(query.x)[2]) is None:
            continue
        value = terms.of(hidden.x)
        if value is None or value.axes != "bfl" or value.terms.shape[-1] != 2 or len(value.terms) < _FEWEST_PAIRS:
            continue
        pooled = [found for user in softmax.users if (found := _pooled(user, softmax, hidden.x)) is not None]
        if not pooled:
            yield Reject("its weights are not for a sum of the products", softmax)
            continue
        vectors = joint_vectors(sorted(set(value.terms.flatten().tolist())), terms)
        if isinstance(vectors, Reject):
            yield vectors
            continue
        i, j = numbered(value.terms, vectors, terms)
        reads = [*vectors, *(node for part in (hidden, query) for node in (part.weight, part.bias) if node is not None)]
        inner = [hidden.x, query.x, softmax, *softmax.all_input_nodes, *pooled]
        bound = {"vectors": vectors, "i": i, "j": j, "hidden": hidden, "query": query, "pooled": tuple(pooled)}
        match = Match(softmax, bound | {"reads": tuple(reads)})
        yield search.unedited(match, [*reads, *inner], softmax, "a tensor it reads is edited in place")


def _scores(softmax: Node) -> Affine | None:
    """What gives [B, P, 1], or a view [B, P] of it, that a softmax over the pairs reads."""
    source, dim, *dtype = softmax.args
    if not isinstance(source, Node) or not isinstance(dim, int) or any(dtype) or softmax.kwargs:
        return None
    shape = shape_of(softmax)
    if len(shape) not in (2, 3) or dim % len(shape) != 1 or (len(shape) == 3 and static(shape[2]) != 1):
        return None
    found = _affine(_through_ones(source))
    return found if found is not None and _outputs(found) == 1 else None


def _through_ones(node: Node) -> Node:
    """The tensor behind views that only add and drop axes of size 1."""
    while (found := viewed(node)) is not None and found[1].is_reshape(shape_of(found[0])):
        node = found[0]
    return node


def _relu(node: Node) -> Node | None:
    source = node.args[0] if node.target is aten.relu.default else None
    return source if isinstance(source, Node) else None


def _affine(node: Node | None) -> Affine | None:
    if node is None or len(shape_of(node)) != 3 or len(node.args) < 2:
        return None
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        return _with_bias(*node.args) or _with_bias(*node.args[::-1])
    call = spelled(node)
    if call is None or len(call.operands) != 2:
        return None
    (x, own), (weight, letters) = call.operands
    if not is_float32(x, "cpu", 3) or not is_float32(weight, "cpu", 2) or own[2] not in letters:
        return None
    outputs = tuple(letter for letter in letters if letter != own[2])
    bias = None if call.bias is None else call.bias[0]
    return Affine(x, weight, letters[0] == own[2], bias) if call.out == (*own[:2], *outputs) else None


def _with_bias(product: object, bias: object) -> Affine | None:
    if not isinstance(product, Node) or not is_float32(bias, "cpu", 1):
        return None
    found = _affine(product) if product.target is not aten.add.Tensor else None
    if found is None or found.bias is not None or static(shape_of(bias)[0]) != _outputs(found):
        return None
    return replace(found, bias=bias)


def _outputs(affine: Affine) -> int | None:
    return static(shape_of(affine.weight)[1 if affine.turned else 0])


def _pooled(user: Node, softmax: Node, products: Node) -> Node | None:
    """The sum over the pairs of softmax * products: a sum of a product, or a matrix product."""
    if _through_ones(user) is softmax and user is not softmax:
        found = [pooled for further in user.users if (pooled := _pooled(further, user, products)) is not None]
        return found[0] if len(found) == 1 else None
    if user.target is aten.mul.Tensor and set(user.args) == {softmax, products} and static(shape_of(softmax)[-1]) == 1:
        sums = [node for node in user.users if node.target is aten.sum.dim_IntList and node.args[1] in ([1], [-2])]
        return (
            sums[0]
            if len(user.users) == len(sums) == 1 and len(shape_of(softmax)) == 3 and not sums[0].kwargs
            else None
        )
    matrix = user.target in (aten.bmm.default, aten.matmul.default) and user.args == (softmax, products)
    return user if matrix and static(shape_of(softmax)[1]) == 1 else None
