"""Results are sources of gradients, as parameters are: `torch.autograd.grad(loss, hidden)` and hooks ask for the
gradient of one result in another. The ways from one to another are those of eager after the rewrites, no less, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fxopt.findings import Miss
from fxopt.normalize.gradients import BARRIER
from fxopt.patterns.core import place_of
from fxopt.rewrites.framework.gradient_paths import GradientPaths
from fxopt.shape.aliases import Aliases, given_on
from fxopt.shape.strides import looks_contiguous
from fxopt.torch_internals.tracing import is_erased

aten = torch.ops.aten
_REASON = (
    "the model returns what other results are computed from, and gradients may be asked for in it: nothing is fused "
    "across it, unless gradients are off"
)


class Held(NamedTuple):
    """A result that others are computed from, and the barrier behind it, which no rewrite takes a way past.

    shared: whether contiguous() gives it of a tensor that others read, and may give back that very tensor; itself:
    whether it did, as that lay in the capture.
    """

    barrier: Node
    shared: bool
    itself: bool


@dataclass
class Sources:
    """Results that have gradients, while passes run.

    held: those that others are computed from.
    alone: of each that nobody reads, its places in the tuple of results, and whether it is shared.
    """

    module: GraphModule
    held: list[Held]
    alone: list[tuple[list[int], bool]]

    @classmethod
    def hold(cls, module: GraphModule) -> Sources:
        """Puts the barriers."""
        paths, aliases = GradientPaths(module.graph), Aliases(module.graph)
        sources, results = cls(module, [], []), results_of(module)
        for result in list(dict.fromkeys(_themselves(module.graph.output_node().all_input_nodes))):
            if not result.op.startswith("call") or not paths.reach(result) or aliases.edited(result):
                continue
            if len(result.users) > 1:
                sources._hold(result)
            elif result in results and not _is_itself(result):
                places = [place for place, one in enumerate(results) if one is result]
                sources.alone.append((places, _is_shared(result)))
        return sources

    @property
    def misses(self) -> list[Miss]:
        """What the report says of them."""
        return [Miss("normalize", _REASON, place_of(held.barrier)) for held in self.held]

    def _hold(self, result: Node) -> None:
        with self.module.graph.inserting_after(result):
            barrier = self._passing_on(BARRIER, result)
        result.replace_all_uses_with(barrier, lambda user: user is not barrier)
        self.held.append(Held(barrier, _is_shared(result), _is_itself(result)))

    def release(self) -> None:
        """Takes the barriers away. A result that passes have found equal to what others read is a tensor of its own."""
        for barrier, shared, itself in self.held:
            if is_erased(barrier):
                continue
            (source,) = barrier.all_input_nodes
            if itself or _is_apart(source, shared):
                barrier.replace_all_uses_with(source)
                self.module.graph.erase_node(barrier)
            else:
                barrier.target = aten.alias.default
        output, results = self.module.graph.output_node(), results_of(self.module)
        for places, shared in self.alone:
            result = results[places[0]]
            if results.count(result) > len(places) or not _is_apart(result, shared):
                with self.module.graph.inserting_before(output):
                    view = self._passing_on(aten.alias.default, result)
                for place in places:
                    results[place] = view
        output.args = (tuple(results),)

    def _passing_on(self, target: Callable[..., Any], result: Node) -> Node:
        node = self.module.graph.call_function(target, (result,))
        node.meta = {key: result.meta[key] for key in ("val", "place", "origins") if key in result.meta}
        return node


def _themselves(results: list[Node]) -> Iterator[Node]:
    """The results, and what one of them may be, where the sizes or strides of an input decide whether it is another."""
    for result in results:
        yield result
        while given := given_on(result):
            (result,) = given
            yield result


def _is_shared(result: Node) -> bool:
    """Whether contiguous() may give back a tensor that others read as well."""
    return result.target is aten.contiguous.default and len(result.all_input_nodes[0].users) > 1


def _is_itself(result: Node) -> bool:
    """Whether it does, as that tensor lay in the capture."""
    return _is_shared(result) and looks_contiguous(result.all_input_nodes[0])


def _is_apart(result: Node, shared: bool) -> bool:
    """Whether nobody else reads it, nor what contiguous() may give back, unless that was so before."""
    while not shared and result.target is aten.contiguous.default and len(result.users) == 1:
        (result,) = result.all_input_nodes
    return len(result.users) == 1


def results_of(module: GraphModule) -> list[Any]:
    """What a graph returns."""
    (results,) = module.graph.output_node().args
    return list(results)  # type: ignore[arg-type]
