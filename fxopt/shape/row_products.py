"""Where the rows of products, norms and attention are, from where those of their arguments are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.shape.placements import Rows, Rowwise, Unknown, agreed


def linear(call: Rowwise) -> Rows:
    source, found = call.only("input")
    if found.dim == call.rank(source) - 1:
        raise Unknown
    return found


def addmm(call: Rowwise) -> Rows:
    _, found = call.only("mat1")
    if found.dim != 0:
        raise Unknown
    return found


def baddbmm(call: Rowwise) -> Rows:
    """[E, M, K] x [E, K, N], rows in M."""
    _, found = call.only("batch1")
    if found.dim != 1:
        raise Unknown
    return found


def matmul(call: Rowwise) -> Rows:
    """[.., M, K] x [.., K, N]: rows in the batch dims of both or of one, or in M."""
    left, right = call.arguments.get("self"), call.arguments.get("mat2", call.arguments.get("other"))
    if not isinstance(left, Node) or not isinstance(right, Node) or min(call.rank(left), call.rank(right)) < 2:
        raise Unknown
    aligned = []
    for source, summed in ((left, 1), (right, 2)):
        if found := call.rows(source):
            if call.rank(source) - found.dim == summed:
                raise Unknown
            aligned.append(replace(found, dim=found.dim + len(call.shape) - call.rank(source)))
    if any(call.rows(source) for source in call.node.all_input_nodes if source not in (left, right)):
        raise Unknown
    found = agreed(aligned)
    if found.dim == len(call.shape) - 2 and call.rows(right):
        raise Unknown
    return found


def einsum(call: Rowwise) -> Rows:
    """The letter of the rows is that of no other dim, and of the result."""
    equation: Any = call.arguments["equation"]
    tensors: Any = call.arguments["tensors"]
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        raise Unknown
    operands = [(term, call.rows(tensor)) for term, tensor in zip(terms.split(","), tensors, strict=True)]
    found = agreed(replace(place, dim=0) for _, place in operands if place)
    letters = {term[place.dim] for term, place in operands if place}
    others = {letter for term, place in operands for dim, letter in enumerate(term) if not place or dim != place.dim}
    if len(letters) != 1 or not letters <= set(result) or letters & others:
        raise Unknown
    return replace(found, dim=result.index(letters.pop()))


def attention(call: Rowwise) -> Rows:
    names = ("query", "key", "value", "attn_mask")
    found = agreed(place for name in names if (place := call.rows(call.arguments.get(name))))
    if found != Rows(0) or not all(call.rows(call.arguments[name]) for name in names[:3]):
        raise Unknown
    mask = call.arguments.get("attn_mask")
    if isinstance(mask, Node) and call.rows(mask) and call.rank(mask) != len(call.shape):
        raise Unknown
    return found


def images(call: Rowwise) -> Rows:
    """Convolutions and poolings of [B, C, ..] by weights that all rows share."""
    name = "input" if "input" in call.arguments else "self"
    source, found = call.only(name)
    channels = 3 if "1d" in str(call.node.target) else 4
    if found != Rows(0) or call.rank(source) != channels:
        raise Unknown
    return found


def batch_norm(call: Rowwise) -> Rows:
    source, found = call.only("input")
    training: Any = call.arguments["training"]
    if training or found.dim == 1 or call.rank(source) < 2:
        raise Unknown
    return found


def layer_norm(call: Rowwise) -> Rows:
    source, found = call.only("input")
    normalized: Any = call.arguments["normalized_shape"]
    if found.dim >= call.rank(source) - len(normalized):
        raise Unknown
    return found


def chain(call: Rowwise) -> Rows:
    """Linear layers over the last dim of the inputs."""
    inputs, state = call.node.args[:2]
    found = agreed(place for source in inputs if (place := call.rows(source)))  # type: ignore[union-attr]
    if any(call.rows(source) is None for source in inputs) or any(map(call.rows, state)):  # type: ignore[union-attr,arg-type]
        raise Unknown
    if found.dim >= len(call.shape) - 1:
        raise Unknown
    return found


def by_axes(call: Rowwise) -> Rows:
    """meta["axes"]: (dims of the arguments, dims of the results) along which it works index by index; None: in none."""
    sources: list[Node] = []
    map_arg(call.node.args, sources.append)
    places = list(map(call.rows, sources))
    found = agreed(replace(place, dim=0) for place in places if place)
    for before, after in call.node.meta.get("axes", ()):
        if list(before) == [place and place.dim for place in places]:
            return replace(found, dim=after[0])
    raise Unknown
