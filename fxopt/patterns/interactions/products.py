"""Operators that multiply vectors, and those that sum the products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.interactions.terms import BATCH, FIELD, LANE, MOST_TERMS, Rule, Terms, Value
from fxopt.shape.spelled import Letters, aligned, spelled

aten = torch.ops.aten
_MATRIX_PRODUCTS = (aten.bmm.default, aten.matmul.default)


def _product(terms: Terms, node: Node) -> Value | None:
    """x * y of vectors of one batch, or their dot products, where it sums the lanes; fields are broadcast."""
    call = spelled(node)
    values = terms.operands([operand for operand, _ in call.operands]) if call is not None else None
    if call is None or values is None or len(values) != 2 or not all(value.is_vectors for value in values):
        return None
    words = [letters for _, letters in call.operands]
    kinds = _kinds(words, values)
    if kinds is None or any(kinds[letter] != LANE for letter in set(kinds) - set(call.out)):
        return None
    order = [letter for letter in call.out if kinds[letter] == FIELD]
    fields = ([letter for letter in word if kinds[letter] == FIELD] for word in words)
    left, right = (
        aligned(value.terms, (*own, None), (*order, None)) for own, value in zip(fields, values, strict=True)
    )
    most = math.inf if node.target in _MATRIX_PRODUCTS else MOST_TERMS
    return _paired("".join(kinds[letter] for letter in call.out), left, right, values[0], most)


def _paired(axes: str, left: Tensor, right: Tensor, like: Value, most: float = MOST_TERMS) -> Value | None:
    try:
        pairs = torch.broadcast_tensors(left, right)
    except RuntimeError:
        return None
    return Value(axes, torch.cat(pairs, -1), like.B, like.D) if pairs[0].numel() <= most else None


def _squared(terms: Terms, node: Node) -> Value | None:
    values = terms.operands(node.args[:1])
    if values is None or not values[0].is_vectors or (node.target is not aten.square.default and node.args[1] != 2):
        return None
    (value,) = values
    return _paired(value.axes, value.terms, value.terms, value)


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


def _kinds(words: list[Letters], values: list[Value]) -> dict[Any, str] | None:
    """What each letter stands for, where the operands agree."""
    kinds: dict[Any, str] = {}
    for word, value in zip(words, values, strict=True):
        for letter, kind in zip(word, value.axes, strict=True):
            if kinds.setdefault(letter, kind) != kind:
                return None
    found = list(kinds.values())
    return kinds if found.count(BATCH) == found.count(LANE) == 1 else None


RULES: dict[object, Rule] = {
    aten.pow.Tensor_Scalar: _squared,
    aten.square.default: _squared,
    aten.sum.dim_IntList: _summed,
    **dict.fromkeys((*_MATRIX_PRODUCTS, aten.mul.Tensor, aten.einsum.default), _product),
}
