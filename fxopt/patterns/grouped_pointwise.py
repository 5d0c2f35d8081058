"""Calls of one pointwise plan on CUDA that need not wait for each other: batch norms of experts, gates, towers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from fxopt.kernels.pointwise.serves import calls_at_once, sizes_matter
from fxopt.patterns.core import Match, Reject, Search, calls_of_ours
from fxopt.patterns.groups import alike
from fxopt.shape.sizes import expression, shape_of


@dataclass(frozen=True)
class Call:
    """A call of fxopt::pointwise."""

    anchor: Node

    @property
    def reads(self) -> list[Node]:
        return list(self.anchor.args[0])  # type: ignore[arg-type]

    @property
    def plan(self) -> str:
        return self.anchor.args[1]  # type: ignore[return-value]


def find_grouped_pointwise(search: Search) -> Iterator[Match | Reject]:
    """Matches bind the `calls` of one launch, two at least. Where there are sums, all have the same sizes."""
    found = map(Call, calls_of_ours(search.graph, "fxopt::pointwise") if search.inference else ())
    on_cuda = (call for call in found if call.reads[0].meta["val"].is_cuda)
    for together in alike(search, on_cuda, _key):
        most = calls_at_once(together[0].plan)
        for calls in (together[at : at + most] for at in range(0, len(together), most)):
            if len(calls) > 1:
                yield Match(min(call.anchor for call in calls), {"calls": calls})


def _key(call: Call) -> object:
    kinds = tuple((read.meta["val"].dtype, read.meta["val"].device) for read in call.reads)
    sizes = tuple(tuple(map(expression, shape_of(read))) for read in call.reads if sizes_matter(call.plan))
    return call.plan, kinds, sizes
