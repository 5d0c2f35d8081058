"""Inputs at sizes that can tell: no two independent ones coincide, none is 0 or 1, and rows are no copies of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from fxopt.capture import Capture
from fxopt.capture.guards import Guards
from fxopt.shape.lookups import indices_of, is_lookup
from fxopt.verify.made import Made
from fxopt.verify.reads import Reads, bags, holds_integers, is_of_others
from fxopt.verify.segments import Roles, Segments, are_sound, segments_of
from fxopt.verify.sizes import Size, ambiguous, chosen, constants_of, merged, sizes_of


@dataclass(frozen=True)
class Witness:
    """Made-up inputs, and their sizes in words."""

    inputs: list[Tensor]
    sizes: str


class Witnesses:
    """Where the sizes and values of a call cannot tell a wrong graph from a right one, others that can.

    Attributes:
        needed: whether the call itself is none.
        reason: why nothing is made up, "" where something may be.
    """

    def __init__(self, captured: Capture, inputs: Sequence[Tensor], state: Callable[[], Sequence[Tensor]]) -> None:
        self.captured, self.inputs, self.state = captured, inputs, state
        self.graph: fx.Graph = captured.graph.graph
        self.constants = constants_of(captured)
        self.sizes = sizes_of(captured, inputs)
        self.ambiguous = ambiguous(self.sizes, self.constants)
        self.needed = bool(self.sizes) and (bool(self.ambiguous) or not self._rows_differ())
        self.reason = ""

    def tries(self) -> Iterator[Witness]:
        """Inputs that eager may still refuse: values at random; rows of the call's own; only sizes that cannot tell
        changed, since values such as a row's last position may point into another; sizes that coincide kept so.
        """
        kept = self._kept()
        roles = {k: role for k, role in self._roles().items() if k not in kept}
        fixed = {size.name for size in self.sizes if any(k in kept for k, _ in size.dims)}
        stuck = next((size for size in self.ambiguous if size.name in fixed), None)
        if stuck is not None:
            call = next(kept[k] for k, _ in stuck.dims if k in kept)
            place = f" ({call.meta['place']})" if call.meta.get("place") else ""
            self.reason = f"{call.target}{place} reads inputs of size {stuck.name}, and might crash on made-up integers"
            return
        self.reason = "no other sizes were found that fulfil the guards"
        together, telling = merged(self.sizes), {size.name for size in self.sizes if size not in self.ambiguous}
        tries = [(self.sizes, fixed, False)] * (not self._on_cuda) + [(self.sizes, fixed, True)]
        tries += [(self.sizes, fixed | telling, True)] * bool(self.ambiguous and telling - fixed)
        tries += [(together, fixed, True)] * (len(together) < len(self.sizes))
        for sizes, unchanged, resampled in tries:
            witness = self._made(sizes, kept, unchanged, roles, resampled)
            if witness is not None:
                self.reason = "eager raises on inputs that are made up"
                yield witness

    def narrowed(self) -> tuple[Guards, str]:
        """The guards for what the call's own sizes can vouch for, and what they add, in words: sizes that are 0, 1 or
        one of the graph's stay what they are, and those that coincide remain equal.
        """
        groups: dict[int, list[Size]] = {}
        for size in self.ambiguous:
            groups.setdefault(size.own, []).append(size)
        fixed = {own: group for own, group in groups.items() if own < 2 or own in self.constants}
        static = [(dim, own) for own, group in fixed.items() for size in group for dim in size.dims]
        equal = [group for own, group in groups.items() if own not in fixed]
        words = [f"{size.name}={own}" for own, group in fixed.items() for size in group]
        words += ["=".join(size.name for size in group) for group in equal]
        together = [sum((size.dims for size in group), ()) for group in equal]
        return self.captured.guards.narrowed(static, together), ", ".join(words)

    @property
    def _on_cuda(self) -> bool:
        return any(t.is_cuda for t in self.inputs)

    def _rows_differ(self) -> bool:
        return all(
            not torch.equal(self.inputs[k], self.inputs[k].narrow(axis, 0, 1).expand_as(self.inputs[k]))
            for size in self.sizes
            for k, axis in size.dims
            if self.inputs[k].numel()
        )

    def _kept(self) -> dict[int, fx.Node]:
        """Inputs behind integers that operators of others read, or bags whose offsets are not understood; by whom."""
        reads = Reads(self.graph, len(self.inputs))
        kept: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            if is_of_others(node) and any(map(holds_integers, node.all_input_nodes)):
                kept |= dict.fromkeys(reads.behind(node.all_input_nodes), node)
        roles = self._roles()
        for ids, offsets, _, call in bags(self.graph):
            of_offsets = reads.behind([offsets], sizes=False)
            if of_offsets and not of_offsets & roles.keys():
                kept |= dict.fromkeys(of_offsets | reads.behind([ids], sizes=False), call)
        return kept

    def _roles(self) -> dict[int, list[Segments]]:
        return segments_of(self.graph, self.inputs, self.sizes)

    def _made(
        self, sizes: Sequence[Size], kept: Collection[int], fixed: set[str], roles: Roles, resampled: bool
    ) -> Witness | None:
        name_of = {dim: size.name for size in sizes for dim in size.dims}
        now = {size.name: name_of[size.dims[0]] for size in self.sizes}  # merged ones have the name of the first
        roles = {k: [replace(role, total=now[role.total]) for role in each] for k, each in roles.items()}
        counts = {k: name_of.get((k, self.inputs[k].dim() - 1), "") for k in roles}
        like = {role.total: counts[k] for k, each in roles.items() for role in each}
        sizes = [replace(size, like=like.get(size.name, "")) for size in sizes]
        own = {size.name: size.own for size in sizes if size.name in fixed}
        values = chosen(self.captured.guards, sizes, own, self.constants)
        if values is None:
            return None
        made = Made(self.graph, self.inputs, sizes, values, roles)
        inputs = [t if k in kept else made.input(k, resampled) for k, t in enumerate(self.inputs)]
        if not self.captured.guards.holds(inputs) or not self._is_safe(inputs):
            return None
        return Witness(inputs, in_words({size.name: values[size.name] for size in sizes}))

    def _is_safe(self, inputs: Sequence[Tensor]) -> bool:
        lookups = list(filter(is_lookup, self.graph.nodes)) if self._on_cuda else []
        if (lookups or bags(self.graph)) and not are_sound(self.captured.graph, self.state(), inputs, lookups):
            return False
        reads = Reads(self.graph, len(inputs))
        changed = {k for k, t in enumerate(inputs) if t.shape != self.inputs[k].shape}
        for node in lookups:
            if indices_of(node) is None and node.all_input_nodes:
                source, *index = node.all_input_nodes
                if reads.behind([source]) & changed and reads.behind(index, sizes=False):
                    return False
        return True


def in_words(sizes: Mapping[str, int]) -> str:
    """As in: s0=5, s1=7 and 3 more."""
    shown = [f"{name}={size}" for name, size in list(sizes.items())[:6]]
    return ", ".join(shown) + (f" and {len(sizes) - 6} more" if len(sizes) > 6 else "")
