"""Lengths and offsets of jagged values: which inputs are some, others that fit, and whether bags may trust them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxopt.shape.calls import ancestors
from fxopt.shape.lookups import indices_of, is_in_range
from fxopt.verify.reads import Reads, bags, is_of_others
from fxopt.verify.sizes import Size

aten = torch.ops.aten
_COUNTED = (aten.item.default, aten._local_scalar_dense.default)


@dataclass(frozen=True)
class Segments:
    """An input, or a row of one, that shares `total` values out.

    kind: "lengths", "starts" (offsets without the end), or "bounds" (with it: one more than there are segments).
    """

    kind: str
    total: str


Roles = Mapping[int, Sequence[Segments]]  # by number of an input: one, or one for each row of stacked offsets


def segments_of(graph: fx.Graph, inputs: Sequence[Tensor], sizes: Sequence[Size]) -> dict[int, list[Segments]]:
    """By number, the inputs that are lengths or offsets in front of a bag, or decide about sizes."""
    reads = Reads(graph, len(inputs))
    name_of = {dim: size.name for size in sizes for dim in size.dims}
    found: dict[int, Segments] = {}
    rows: dict[int, dict[int, Segments]] = {}
    for ids, offsets, *_ in bags(graph):
        totals = {name_of.get((k, 0), "") for k in reads.behind([ids], sizes=False)} - {""}
        _find(found, inputs, sizes, reads, offsets, totals)
        number, row = _row_of(offsets, reads)
        if number is not None and (role := _row_role(inputs[number], row, sizes, totals)):
            rows.setdefault(number, {})[row] = role
    for node in graph.nodes:
        if node.target in _COUNTED:
            _find(found, inputs, sizes, reads, node, {size.name for size in sizes})
    stacked = {k: _alike(each) for k, each in rows.items() if len(each) == len(inputs[k])}
    return {k: [role] for k, role in found.items()} | stacked


def _alike(rows: Mapping[int, Segments]) -> list[Segments]:
    """Offsets without the end look as if they had it where the last segment is empty."""
    kind = "bounds" if all(role.kind == "bounds" for role in rows.values()) else "starts"
    return [replace(rows[row], kind=kind) for row in sorted(rows)]


def _row_of(value: fx.Node, reads: Reads) -> tuple[int | None, int]:
    """Number and row, where a value is a row of an input as it lies: offsets of all features in one tensor."""
    source, row = value, None
    if value.target is aten.select.int and value.args[1] == 0:
        source, row = value.args[0], value.args[2]  # type: ignore[assignment]
    elif value.target is operator.getitem and getattr(value.args[0], "target", None) is aten.unbind.int:
        source, row = value.args[0].args[0], value.args[1]  # type: ignore[union-attr,assignment]
    number = reads.inputs.get(source)
    return (None, 0) if type(row) is not int or row < 0 else (number, row)


def _row_role(stacked: Tensor, row: int, sizes: Sequence[Size], totals: set[str]) -> Segments | None:
    own = {size.name: size.own for size in sizes}
    kinds = {total: _kind(stacked[row], own[total], False) for total in sorted(totals) if stacked.dim() == 2}
    return next((Segments(kind, total) for total, kind in kinds.items() if kind in ("starts", "bounds")), None)


def _find(
    found: dict[int, Segments],
    inputs: Sequence[Tensor],
    sizes: Sequence[Size],
    reads: Reads,
    value: fx.Node,
    totals: set[str],
) -> None:
    numbers = reads.behind([value], sizes=False) - found.keys()
    summed = numbers and any("sum" in str(node.target) for node in ancestors([value]))
    for number in sorted(numbers):
        own = {size.name for size in sizes if (number, 0) in size.dims}
        for total in (size for size in sizes if own and size.name in totals - own):
            if kind := _kind(inputs[number], total.own, bool(summed)):
                found[number] = Segments(kind, total.name)
                break


def _kind(tensor: Tensor, total: int, summed: bool) -> str:
    """What a tensor of integers is to `total` values, "" for nothing. summed: as lengths are on their way."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
        return ""
    lengths = int(tensor.min()) >= 0 and int(tensor.sum()) == total
    starts = int(tensor[0]) == 0 and int(tensor[-1]) <= total and bool((tensor.diff() >= 0).all())
    if lengths and (summed or not starts):
        return "lengths"
    if not starts:
        return ""
    return "bounds" if len(tensor) > 1 and int(tensor[-1]) == total else "starts"


class Shares:
    """Random lengths for each total and number of segments, the same ones for all inputs that tell of them."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._made: dict[tuple[str, int], Tensor] = {}

    def drawn(self, tensor: Tensor, role: Segments, length: int, total: int) -> Tensor:
        """What `tensor` is to its values, for `total` of them."""
        lengths = self._lengths(role.total, length - (role.kind == "bounds"), total)
        ends = lengths.cumsum(0)
        made = {"lengths": lengths, "starts": ends - lengths, "bounds": torch.cat([ends.new_zeros(1), ends])}
        return made[role.kind].to(tensor)

    def _lengths(self, name: str, count: int, total: int) -> Tensor:
        if (name, count) not in self._made:
            owners = torch.randint(0, max(1, count), (total,), generator=self.generator, device="cpu")
            self._made[name, count] = owners.bincount(minlength=max(0, count))
        return self._made[name, count]


def are_sound(
    graph: fx.GraphModule, state: Sequence[Tensor], inputs: Sequence[Tensor], lookups: Sequence[fx.Node] = ()
) -> bool:
    """Whether the ids and offsets of all jagged bags are proper, and the integers of `lookups` in range, computed as
    the graph computes them.
    """
    calls, indices = bags(graph.graph), {node: indices_of(node) or [] for node in lookups}
    read = [integers for found in indices.values() for _, _, integers in found]
    needed = ancestors([*read, *(each for call in calls for each in (call.ids, call.offsets))])
    placeholders = graph.graph.find_nodes(op="placeholder")
    known: dict[fx.Node, Any] = dict(zip(placeholders, (*state, *inputs), strict=True))
    try:
        for node in graph.graph.nodes:
            if not all(is_in_range(node, index, known) for index in indices.get(node, ())):
                return False
            if node in needed and node not in known:
                known[node] = _computed(graph, node, known)
        return all(_are_offsets(known[call.offsets], known[call.ids], call.ends) for call in calls)
    except Exception:  # what cannot be computed is not known to be sound
        return False


def _computed(graph: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    schema = getattr(node.target, "_schema", None)
    if is_of_others(node) or (schema is not None and schema.is_mutable):
        raise ValueError(f"'{node.name}' may do more than compute")
    if node.op == "get_attr":
        return getattr(graph, str(node.target))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _are_offsets(offsets: Tensor, ids: Tensor, ends: bool) -> bool:
    """They begin at 0, never fall, and none is behind the ids. Ids that are in no bag are a crash, too."""
    if not offsets.numel():
        return not ids.numel()
    first, last = int(offsets[0]), int(offsets[-1])
    fits = last == ids.numel() if ends else last <= ids.numel()
    return first == 0 and fits and bool((offsets.diff() >= 0).all())
