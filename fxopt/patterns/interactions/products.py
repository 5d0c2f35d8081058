"""Operators that multiply vectors, and those that sum the products."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.patterns.interactions.terms import BATCH, FIELD, LANE, MOST_TERMS, Rule, Terms, Value

aten = torch.ops.aten


def _multiplied(terms: Terms, node: Node) -> Value | None:
    """x * y of vectors, with fields broadcast."""
    values = terms.operands(node.args[:2])
    if values is None or len(node.args) != 2 or not all(value.is_vectors for value in values):
        return None
    left, right = values  # a batch comes first, so vectors of fewer dims would be broadcast along it
    return _paired(left.axes, left, right) if left.axes == right.axes else None


def _paired(axes: str, left: Value, right: Value) -> Value | None:
    try:
        pairs = torch.broadcast_tensors(left.terms, right.terms)
    except RuntimeError:
        return None
    return Value(axes, torch.cat(pairs, -1), left.B, left.D) if pairs[0].numel() <= MOST_TERMS else None


def _squared(terms: Terms, node: Node) -> Value | None:
    values = terms.operands(node.args[:1])
    if values is None or not values[0].is_vectors or (node.target is not aten.square.default and node.args[1] != 2):
        return None
    return _paired(values[0].axes, values[0], values[0])


def _summed(terms: Terms, node: Node) -> Value | None:
    """Products summed over their lanes are dot products."""
    source, dims, keep, *_ = (*node.args, None, None, None)
    value = terms.of(source) if isinstance(source, Node) and isinstance(dims, list | tuple) and len(dims) == 1 else None
    if value is None or value.terms.shape[-1] != 2 or LANE not in value.axes or node.kwargs:
        return None
    dim = int(dims[0]) % len(value.axes)  # type: ignore[index]
    if value.axes[dim] != LANE:
        return None
    return _contracted(value, dim, bool(keep))


def _contracted(value: Value, dim: int, keep: bool) -> Value:
    if not keep:
        return Value(value.axes[:dim] + value.axes[dim + 1 :], value.terms, value.B, value.D)
    at = value.axes[:dim].count(FIELD)
    axes = value.axes[:dim] + FIELD + value.axes[dim + 1 :]
    return Value(axes, value.terms.unsqueeze(at), value.B, value.D)


def _matrix_product(terms: Terms, node: Node) -> Value | None:
    """[B, F, D] x [B, D, G]."""
    values = terms.operands(node.args[:2])
    if values is None or [value.axes for value in values] != ["bfl", "blf"]:
        return None
    left, right = values
    if left.terms.shape[-1] != 1 or right.terms.shape[-1] != 1:
        return None
    pairs = torch.broadcast_tensors(left.terms[:, None], right.terms[None])
    return Value("bff", torch.cat(pairs, -1), left.B, left.D)


def _einsum(terms: Terms, node: Node) -> Value | None:
    """Two operands, whose lanes are summed and whose batch is kept."""
    equation, operands = node.args[:2]
    if not isinstance(equation, str) or not isinstance(operands, list | tuple) or len(operands) != 2:
        return None
    values = terms.operands(operands)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if values is None or not arrow or len(words) != 2 or not all(value.is_vectors for value in values):
        return None
    kinds = _kinds(words, values)
    if kinds is None or set(kinds) - set(output) != {letter for letter in kinds if kinds[letter] == LANE}:
        return None
    if not set(output) <= set(kinds) or len(set(output)) < len(output):
        return None
    fields = [letter for letter in output if kinds[letter] == FIELD]
    left, right = (_aligned(value, word, fields) for word, value in zip(words, values, strict=True))
    return _paired("".join(kinds[letter] for letter in output), left, right)


def _kinds(words: list[str], values: list[Value]) -> dict[str, str] | None:
    """What each letter of an einsum stands for, where the operands agree."""
    kinds: dict[str, str] = {}
    for word, value in zip(words, values, strict=True):
        if len(word) != len(value.axes) or len(set(word)) < len(word) or "." in word:
            return None
        for letter, kind in zip(word, value.axes, strict=True):
            if kinds.setdefault(letter, kind) != kind:
                return None
    found = list(kinds.values())
    return kinds if found.count(BATCH) == found.count(LANE) == 1 else None


def _aligned(value: Value, word: str, fields: list[str]) -> Value:
    """The value with its field dims in the order of `fields`, those it lacks of size 1."""
    own = [letter for letter, kind in zip(word, value.axes, strict=True) if kind == FIELD]
    terms = value.terms.permute([own.index(letter) for letter in fields if letter in own] + [len(own)])
    for at, letter in enumerate(fields):
        if letter not in own:
            terms = terms.unsqueeze(at)
    return Value(value.axes, terms, value.B, value.D)


RULES: dict[object, Rule] = {
    aten.mul.Tensor: _multiplied,
    aten.pow.Tensor_Scalar: _squared,
    aten.square.default: _squared,
    aten.sum.dim_IntList: _summed,
    aten.bmm.default: _matrix_product,
    aten.matmul.default: _matrix_product,
    aten.einsum.default: _einsum,
}
