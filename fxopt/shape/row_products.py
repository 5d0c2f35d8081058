"""Where the rows of products, norms and attention are, from where those of their arguments are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.shape.placements import Rows, Rowwise, Unknown, agreed
from fxopt.shape.sizes import shape_of, static
from fxopt.shape.spelled import spelled


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


def by_letters(call: Rowwise) -> Rows:
    """Sums of products: the letter of the rows is that of no other dim but of size 1, and of the result."""
    product = spelled(call.node)
    if product is None or product.bias is not None:
        raise Unknown
    operands = [(letters, call.rows(source), shape_of(source)) for source, letters in product.operands]
    found = agreed(replace(place, dim=0) for _, place, _ in operands if place)
    named = {letters[place.dim] for letters, place, _ in operands if place}
    others = {
        letter
        for letters, place, shape in operands
        for dim, (letter, size) in enumerate(zip(letters, shape, strict=True))
        if static(size) != 1 and not (place and dim == place.dim)
    }
    if len(named) != 1 or not named <= set(product.out) or named & others:
        raise Unknown
    return replace(found, dim=product.out.index(named.pop()))


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
