"""Calls of one pointwise plan on CUDA that need not wait for each other: batch norms of experts, gates, towers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxopt.kernels.pointwise.serves import calls_at_once, sizes_matter
from fxopt.patterns.core import Match, Reject, calls_of_ours
from fxopt.patterns.groups import group
from fxopt.shape.aliases import Aliases
from fxopt.shape.sizes import expression, shape_of
from fxopt.shape.standing import analysed


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


def find_grouped_pointwise(module: GraphModule, inference: bool) -> Iterator[Match | Reject]:
    """Matches bind the `calls` of one launch, two at least. Where there are sums, all have the same sizes."""
    alike: dict[object, list[Call]] = {}
    for node in calls_of_ours(module.graph, "fxopt::pointwise") if inference else ():
        call = Call(node)
        values = [read.meta["val"] for read in call.reads]
        if values[0].is_cuda:
            kinds = tuple((value.dtype, value.device) for value in values)
            sizes = tuple(tuple(map(expression, shape_of(read))) for read in call.reads if sizes_matter(call.plan))
            alike.setdefault((call.plan, kinds, sizes), []).append(call)
    aliases = analysed(module.graph, Aliases)
    for same in alike.values():
        for together in group(module.graph, same, aliases):
            most = calls_at_once(same[0].plan)
            for calls in (together[at : at + most] for at in range(0, len(together), most)):
                if len(calls) > 1:
                    yield Match(min(call.anchor for call in calls), {"calls": calls})
