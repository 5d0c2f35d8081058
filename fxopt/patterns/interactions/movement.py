"""Operators that move terms about: cats, index lists, triangles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.patterns.cats import Join
from fxopt.patterns.interactions.constants import constant_tensor
from fxopt.patterns.interactions.terms import FIELD, MOST_TERMS, NOTHING, Rule, Terms, Value

aten = torch.ops.aten


def _field_axis(value: Value, dim: int) -> int | None:
    """The dim of the terms that is this dim of the tensor."""
    return value.axes[:dim].count(FIELD) if value.axes[dim] == FIELD else None


def joined(terms: Terms, node: Node) -> Value | None:
    """cat or stack along fields."""
    join = Join.of(node)
    values = terms.operands(join.inputs) if join is not None else None
    if join is None or values is None:
        return None
    first = values[0]
    if any(value.axes != first.axes or value.terms.shape[-1] != first.terms.shape[-1] for value in values):
        return None
    if join.is_stack:
        at = first.axes[: join.dim].count(FIELD)
        axes = first.axes[: join.dim] + FIELD + first.axes[join.dim :]
        return Value(axes, torch.stack([value.terms for value in values], at), first.B, first.D)
    along = _field_axis(first, join.dim)
    if along is None:
        return None
    return Value(first.axes, torch.cat([value.terms for value in values], along), first.B, first.D)


def selected(terms: Terms, node: Node) -> Value | None:
    """index_select with constant indices."""
    source, dim, index = node.args
    value = terms.of(source) if isinstance(source, Node) else None
    picked = constant_tensor(index)
    if value is None or picked is None or picked.dim() != 1 or not isinstance(dim, int):
        return None
    at = _field_axis(value, dim % len(value.axes))
    if at is None or not _inside(picked, value.terms.shape[at]):
        return None
    return Value(value.axes, value.terms.index_select(at, picked), value.B, value.D)


def indexed(terms: Terms, node: Node) -> Value | None:
    """x[:, i], x[:, i, j] and x[:, mask] with constants; the indexed dims must follow each other."""
    source, indices = node.args[:2]
    value = terms.of(source) if isinstance(source, Node) else None
    if value is None or not isinstance(indices, list | tuple):
        return None
    places = [dim for dim, index in enumerate(indices) if index is not None]
    constants = [constant_tensor(indices[dim]) for dim in places]
    if not places or any(index is None for index in constants):
        return None
    known = [index for index in constants if index is not None]
    if len(known) == 1 and known[0].dtype == torch.bool:
        mask, start = known[0], places[0]
        places, known = list(range(start, start + mask.dim())), list(mask.nonzero().unbind(1))
    if places != list(range(places[0], places[0] + len(places))) or places[-1] >= len(value.axes):
        return None
    at = _field_axis(value, places[0])
    sizes = [value.terms.shape[at + k] for k in range(len(places))] if at is not None else []
    if at is None or value.axes[places[0] : places[-1] + 1] != FIELD * len(places):
        return None
    if any(index.dtype != torch.int64 or not _inside(index, size) for index, size in zip(known, sizes, strict=True)):
        return None
    index = (*[slice(None)] * at, *known)
    picked: Tensor = value.terms[index]  # type: ignore[index]
    rank = picked.dim() - (value.terms.dim() - len(places))
    axes = value.axes[: places[0]] + FIELD * rank + value.axes[places[-1] + 1 :]
    return Value(axes, picked, value.B, value.D) if picked.numel() <= MOST_TERMS else None


def _inside(index: Tensor, size: int) -> bool:
    return index.dtype == torch.int64 and bool(((index >= -size) & (index < size)).all())


def half(terms: Terms, node: Node) -> Value | None:
    """One half of a Gram matrix, the other one zero."""
    source, *rest = node.args
    value = terms.of(source) if isinstance(source, Node) else None
    if value is None or value.axes[-2:] != "ff" or not all(isinstance(k, int) for k in rest):
        return None
    diagonal: Any = rest[0] if rest else 0
    kept = torch.tril if node.target is aten.tril.default else torch.triu
    keeps = kept(torch.ones(value.terms.shape[-3:-1], device="cpu"), diagonal).bool().unsqueeze(-1)
    return Value(value.axes, value.terms.where(keeps, torch.tensor(NOTHING, device="cpu")), value.B, value.D)


RULES: dict[object, Rule] = {
    aten.cat.default: joined,
    aten.stack.default: joined,
    aten.index_select.default: selected,
    aten.index.Tensor: indexed,
    aten.tril.default: half,
    aten.triu.default: half,
}
