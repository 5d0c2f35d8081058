"""The inputs of a witness: as random as they may be without being wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fxopt.verify.drawn import drawn
from fxopt.verify.reads import Reads, holds_integers
from fxopt.verify.segments import Segments, Shares
from fxopt.verify.sizes import Size, reshaped

_TABLES = ("embedding", "index_select")


class Made:
    """The inputs of one witness."""

    def __init__(
        self,
        graph: fx.Graph,
        own: Sequence[Tensor],
        sizes: Sequence[Size],
        values: Mapping[str, int],
        roles: Mapping[int, Segments],
    ) -> None:
        self.own, self.sizes, self.values, self.roles = own, sizes, values, roles
        self.generator = generator = torch.Generator().manual_seed(0)
        self.shares = Shares(generator)
        self.rooms = _rooms(graph, len(own))
        self.counted = _read_as_integers(graph, len(own))
        totals = {role.total for role in roles.values()}
        self.jagged = {k for size in sizes if size.name in totals for k, axis in size.dims if axis == 0}
        self.rows = {
            size.name: torch.randint(0, max(1, size.own), (values[size.name],), generator=generator) for size in sizes
        }

    def input(self, number: int, resampled: bool) -> Tensor:
        """Input `number` at random; `resampled`: what is read as integers is rows of the call's own."""
        like, role = self.own[number], self.roles.get(number)
        shape = reshaped(like.shape, number, self.sizes, self.values)
        integers = not like.is_floating_point() or number in self.counted
        if role is not None:
            made = self.shares.drawn(like, role, shape[0], self.values[role.total])
        elif resampled and integers and like.numel() and number not in self.jagged:
            made = self._rows_of(like.detach(), number)
        else:
            columns = not any((number, like.dim() - 1) in size.dims for size in self.sizes)
            room = self.rooms.get(number, 0)
            if room and number in self.jagged:
                like = like.clamp(max=room - 1)  # an id may come into another segment, and so another table
            made = drawn(like, shape, columns, room, self.generator)
        return made.requires_grad_(self.own[number].requires_grad)

    def _rows_of(self, like: Tensor, number: int) -> Tensor:
        for size in self.sizes:
            for axis in (axis for k, axis in size.dims if k == number):
                like = like.index_select(axis, self.rows[size.name].to(like.device))
        return like


def _rooms(graph: fx.Graph, count: int) -> dict[int, int]:
    """By number, the rows of the smallest table that an input is looked up in."""
    reads, rooms = Reads(graph, count), dict[int, int]()
    for node in graph.nodes:
        if node.op == "call_function" and any(word in str(node.target) for word in _TABLES) and len(node.args) > 1:
            rows = node.args[0].meta["val"].shape[0] if isinstance(node.args[0], fx.Node) else None
            if type(rows) is int:
                for k in reads.behind([node.args[1 if "embedding" in str(node.target) else -1]], sizes=False):
                    rooms[k] = min(rooms.get(k, rows), rows)
    return rooms


def _read_as_integers(graph: fx.Graph, count: int) -> set[int]:
    """The inputs that integers are computed from."""
    return Reads(graph, count).behind([n for n in graph.nodes if holds_integers(n) and n.op != "placeholder"], False)
