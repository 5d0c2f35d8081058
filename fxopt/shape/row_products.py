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
    return call.beside("input", [-1])


def addmm(call: Rowwise) -> Rows:
    return call.beside("mat1", [-1])


def baddbmm(call: Rowwise) -> Rows:
    """[E, M, K] x [E, K, N], rows in M."""
    return call.beside("batch1", [0, -1])


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
    if call.arguments["training"] or call.rank(call.only("input")[0]) < 2:
        raise Unknown
    return call.beside("input", [1])


def layer_norm(call: Rowwise) -> Rows:
    normalized: Any = call.arguments["normalized_shape"]
    return call.beside("input", range(-len(normalized), 0))


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
