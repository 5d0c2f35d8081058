"""Which dims of a tensor are the batch B, the positions T and the channels C, through views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt.shape.sizes import Size, product, same, same_sizes, shape_of, static
from fxopt.shape.view_operators import through
from fxopt.shape.view_steps import Contiguous, Expand, Permute, Reshape, Select, Unsqueeze

aten = torch.ops.aten
Layout = tuple[str, ...]  # "B", "T", "C", "1", or "BT", a merged dim


@dataclass(frozen=True)
class Sizes:
    """How long each dim is."""

    B: Size
    T: Size

    def of(self, label: str, channels: Size) -> Size:
        return product({"B": self.B, "T": self.T, "C": channels, "1": 1}[letter] for letter in label)


def viewed(node: Node, layout: Layout, sizes: Sizes, channels: int) -> Layout | None:
    """The layout of a view operator's result, None where it is no view, or mixes dims. `layout`: of what it views."""
    _, step = through(node, (aten.expand.default,)) or (node, None)
    match step:
        case Contiguous():
            return layout
        case Permute(order):
            return tuple(layout[dim] for dim in order)
        case Select(dim) if layout[dim] == "1":
            return layout[:dim] + layout[dim + 1 :]
        case Expand(shape) if has(shape, layout, sizes, channels):
            return layout
        case Reshape() | Unsqueeze():
            return _reshaped(shape_of(node), layout, sizes, channels)
    return None


def has(shape: Sequence[Size], layout: Layout, sizes: Sizes, channels: int) -> bool:
    """Whether a tensor of this shape has this layout."""
    return same_sizes(shape, [sizes.of(label, channels) for label in layout])


def _reshaped(shape: Sequence[Size], layout: Layout, sizes: Sizes, channels: int) -> Layout | None:
    """Dims merged, split or of size 1, in their order."""
    left = [letter for label in layout for letter in label if letter != "1"]
    new: list[str] = []
    for size in shape:
        taken = next((n for n in (1, 2) if same(sizes.of("".join(left[:n]), channels), size) and left[:n]), 0)
        label = "".join(left[:taken])
        if taken and label in ("B", "T", "C", "BT"):
            new.append(label)
            del left[:taken]
        elif static(size) == 1:
            new.append("1")
        else:
            return None
    return None if left else tuple(new)


def to_rows(node: Node, layout: Layout, sizes: Sizes, channels: int = 1) -> tuple[tuple[Any, ...], ...] | None:
    """View operators that make [B, T] of a mask that broadcasts against a tensor of `layout`: (target, *arguments)."""
    shape = shape_of(node)
    if len(shape) > len(layout):
        return None
    labels = list(layout[len(layout) - len(shape) :])
    views: list[tuple[Any, ...]] = []
    for dim in reversed(range(len(shape))):
        if labels[dim] not in ("B", "T", "1") or (
            not same(shape[dim], sizes.of(labels[dim], channels)) and static(shape[dim]) != 1
        ):
            return None
        if labels[dim] == "1":
            views.append((aten.select.int, dim, 0))
            del labels[dim]
    if labels == ["T"]:
        views.append((aten.unsqueeze.default, 0))
    elif labels == ["T", "B"]:
        views.append((aten.transpose.int, 0, 1))
    elif labels != ["B", "T"]:
        return None
    return tuple(views)
