"""From a view to the kernel's source: which dims are rows, which one holds the ids of a row."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxopt.patterns.embedding_columns.index_value import IndexValue, itself
from fxopt.shape.sizes import Size, product, same, static
from fxopt.shape.views import Axis, Part


@dataclass(frozen=True)
class Layout:
    """An index value laid out for the kernel: `rows` (one or two dims, or none: shared), and a lane dim."""

    value: IndexValue
    rows: tuple[Part, ...]
    lane: Part | None
    fixed: tuple[tuple[int, int], ...]

    @property
    def reads(self) -> list[Node]:
        return self.value.reads


def layout_of(value: IndexValue, rows: int) -> Layout | None:
    """`value` with its first `rows` axes as rows, the rest as lanes; None where its strides are too wild."""
    row_parts, row_ones = _parts(value.view.axes[:rows])
    lane_parts, lane_ones = _parts(value.view.axes[rows:])
    if not 1 <= len(row_parts) <= 2 or len(lane_parts) > 1:
        return None
    if any(part.start or not part.whole for part in row_parts):
        return None
    if lane_parts and static(lane_parts[0].size) is None and not lane_parts[0].whole:
        return None
    lane = lane_parts[0] if lane_parts else None
    if value.per_lane and not _is_innermost(value.view.axes[-1], lane_parts or row_parts[1:]):
        return None
    fixed = value.view.fixed + tuple((part.dim, part.start) for part in row_ones + lane_ones)
    return Layout(value, tuple(row_parts), lane, fixed)


def laid_out(value: IndexValue, node: Node, rows: int) -> Layout | None:
    """The same. Where the strides are too wild, torch materializes `node`, and the kernel starts there."""
    return layout_of(value, rows) or layout_of(itself(node), rows)


def split_rows(shape: tuple[Size, ...], rows: Size) -> int | None:
    """How many leading axes of `shape` make `rows` rows: as many as possible, so that few lanes remain."""
    fitting = [count for count in range(len(shape) + 1) if same(product(shape[:count]), rows)]
    return fitting[-1] if fitting else None


def _is_innermost(axis: Axis, inner: list[Part]) -> bool:
    """Whether the dim that a step per lane runs over, the lanes or else the second one of the rows, is this axis."""
    return bool(inner) and axis.parts == tuple(inner)


def _parts(axes: tuple[Axis, ...]) -> tuple[list[Part], list[Part]]:
    """(parts that vary, parts of size one)."""
    parts = [part for axis in axes for part in axis.parts]
    ones = [part for part in parts if static(part.size) == 1]
    return [part for part in parts if static(part.size) != 1], ones
