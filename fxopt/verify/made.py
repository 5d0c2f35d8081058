"""The inputs of a witness: as random as they may be without being wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxopt.shape.calls import name_of
from fxopt.verify.drawn import drawn
from fxopt.verify.reads import Reads, holds_integers
from fxopt.verify.segments import Roles, Shares
from fxopt.verify.sizes import Size

_MOVES = frozenset({
    "view", "reshape", "slice", "select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "squeeze",
    "unsqueeze", "transpose", "permute", "flatten", "expand", "to", "_to_copy", "contiguous", "clone", "detach",
})  # fmt: skip


class Made:
    """The inputs of one witness."""

    def __init__(
        self,
        graph: fx.Graph,
        own: Sequence[Tensor],
        sizes: Sequence[Size],
        values: Mapping[str, int],
        roles: Roles,
    ) -> None:
        self.own, self.values, self.roles = own, values, roles
        self.names = {dim: size.name for size in sizes for dim in size.dims}
        self.generator = generator = torch.Generator().manual_seed(0)
        self.shares = Shares(generator)
        self.rooms = _rooms(graph, len(own))
        self.counted = _read_as_integers(graph, len(own))
        totals = {role.total for each in roles.values() for role in each}
        self.jagged = {k for size in sizes if size.name in totals for k, axis in size.dims if axis == 0}
        self.rows = {
            size.name: torch.randint(0, max(1, size.own), (values[size.name],), generator=generator, device="cpu")
            for size in sizes
        }

    def input(self, number: int, resampled: bool) -> Tensor:
        """Input `number` at random; `resampled`: what is read as integers is rows of the call's own."""
        like, roles = self.own[number], self.roles.get(number)
        names = [self.names.get((number, axis)) for axis in range(like.dim())]
        shape = [own if name is None else self.values[name] for own, name in zip(like.shape, names, strict=True)]
        integers = not like.is_floating_point() or number in self.counted
        if roles is not None:
            rows = [self.shares.drawn(like, role, shape[-1], self.values[role.total]) for role in roles]
            rows += [torch.zeros_like(rows[0])] * (shape[0] - len(rows) if like.dim() > 1 else 0)  # which nothing reads
            made = rows[0] if like.dim() == 1 else torch.stack(rows)
        elif resampled and integers and like.numel() and number not in self.jagged:
            made = like.detach()
            for axis, name in enumerate(names):
                made = made if name is None else made.index_select(axis, self.rows[name].to(like.device))
        else:
            columns = bool(names) and names[-1] is None
            room = self.rooms.get(number, 0)
            if room and number in self.jagged:
                like = like.clamp(max=room - 1)  # an id may come into another segment, and so another table
            made = drawn(like, shape, columns, room, self.generator)
        return made.requires_grad_(self.own[number].requires_grad)


def _rooms(graph: fx.Graph, count: int) -> dict[int, int]:
    """By number, the rows of the smallest table that an input is looked up in as it is."""
    numbers, rooms = Reads(graph, count).inputs, dict[int, int]()
    for node in graph.nodes:
        if node.op == "call_function" and "embedding" in str(node.target) and len(node.args) > 1:
            table, ids = node.all_input_nodes[0].meta.get("val"), _moved(node.args[1])
            size = table.shape[0] if isinstance(table, Tensor) else None
            if type(size) is int and ids in numbers:
                rooms[numbers[ids]] = min(rooms.get(numbers[ids], size), size)
    return rooms


def _moved(node: Any) -> Any:
    """What has the same integers, elsewhere or cut."""
    while getattr(node, "op", "") == "call_function" and (node.target is operator.getitem or name_of(node) in _MOVES):
        node = node.args[0]
    return node


def _read_as_integers(graph: fx.Graph, count: int) -> set[int]:
    """The inputs that integers are computed from."""
    return Reads(graph, count).behind([n for n in graph.nodes if holds_integers(n) and n.op != "placeholder"], False)
