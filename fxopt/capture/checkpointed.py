"""Regions under torch.utils.checkpoint: traced like all else, then cut out as one call that is checkpointed again.

Nothing inside is saved for backward, and nothing is moved into a region or out of it. What a graph cannot say of one
(memory of others that it edits, opaque modules in it) leaves the module that asked for the checkpoint to eager.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule
from torch.utils.checkpoint import checkpoint

from fxopt.capture.errors import CaptureError
from fxopt.findings import Place
from fxopt.shape.aliases import Aliases, mutates, written_arguments
from fxopt.torch_internals.tracing import SYMBOLIC

if TYPE_CHECKING:
    from fxopt.capture.trace import Tracer


class Checkpointed(nn.Module):
    """One region. Flat tensors and sizes in, flat tuple out.

    Attributes:
        own_backward: tells those who do not import this module that backward is not the graph's.
        place: where the checkpoint was asked for; reason: for the report.
        options: what else it was asked for.
    """

    own_backward = True
    reason = "runs under torch.utils.checkpoint: it stays as it is, so that nothing inside is kept for backward"

    def __init__(self, graph: GraphModule, place: Place, options: dict[str, Any]) -> None:
        super().__init__()
        self.graph = graph
        self.place = place
        self.options = options

    def forward(self, *flat: Any) -> tuple:
        if not torch.is_grad_enabled():
            return self.graph(*flat)
        return checkpoint(self.graph, *flat, use_reentrant=False, **self.options)


@dataclass(frozen=True)
class _Region:
    place: Place
    options: dict[str, Any]


class Regions:
    """Of one trace: its nodes are marked while it runs, and cut out when it is done."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._found: list[_Region] = []

    @contextlib.contextmanager
    def region(self, plain: bool = True, **options: Any) -> Iterator[None]:
        """What is recorded meanwhile is one region. One within another is a part of it."""
        if not plain:
            raise CaptureError("takes context_fn or debug of torch.utils.checkpoint")
        before = next(iter(reversed(self._tracer.graph.nodes)), None)
        number, place = len(self._found), self._tracer.here()
        self._found.append(_Region(place, options))
        yield
        for node in reversed(self._tracer.graph.nodes):
            if node is before:
                break
            node.meta["region"] = number

    def reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """checkpoint(use_reentrant=True), which gives gradients only where an argument wants one."""
        if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            with torch.no_grad():
                return function(*args)
        with self.region(preserve_rng_state=preserve_rng_state):
            return function(*args)

    def cut(self, module: GraphModule) -> None:
        """Put a call in the place of each region.

        Raises:
            CaptureError: it does what cannot be cut out.
        """
        marked: dict[int, list[Node]] = {}
        for node in module.graph.nodes:
            if "region" in node.meta:
                marked.setdefault(node.meta["region"], []).append(node)
        for number, nodes in marked.items():
            found = self._found[number]
            inside = _inside(nodes)
            if any(isinstance(node.meta.get("val"), torch.Tensor) for node in inside):
                _refuse(module, inside, found.place)
                _cut(module, inside, f"checkpointed{number}", found)
        module.recompile()


def _inside(nodes: Sequence[Node]) -> list[Node]:
    """Without constants and sizes of what lies outside: others read these, too."""
    inside = dict[Node, None]()
    for node in nodes:
        size = isinstance(node.meta.get("val"), SYMBOLIC)
        if node.op != "get_attr" and not (size and inside.keys().isdisjoint(node.all_input_nodes)):
            inside[node] = None
    return list(inside)


def _refuse(module: GraphModule, inside: Sequence[Node], place: Place) -> None:
    region = set(inside)
    if any(node.op != "call_function" for node in region):
        raise CaptureError("has a submodule under torch.utils.checkpoint that no graph can hold", place)
    if written := [argument for node in inside if mutates(node) for argument in written_arguments(node)]:
        aliases = Aliases(module.graph)
        if not all(region.issuperset(aliases.sharing(argument)) for argument in written):
            raise CaptureError("edits memory under torch.utils.checkpoint that others see", place)
    node = inside[0]
    while node is not inside[-1]:
        node = node.next
        if node not in region and not region.isdisjoint(node.all_input_nodes):
            raise CaptureError("decides by data under torch.utils.checkpoint", place)


def _cut(module: GraphModule, inside: list[Node], name: str, found: _Region) -> None:
    part, inputs, outputs = fuse_as_graphmodule(module, inside, name, always_return_tuple=True)
    module.add_module(name, Checkpointed(part, found.place, found.options))
    with module.graph.inserting_after(inside[-1]):
        call = module.graph.call_module(name, inputs)
    call.meta.update(val=[node.meta.get("val") for node in outputs], place=found.place, memory=())
    for at, output in reversed([*enumerate(outputs)]):
        with module.graph.inserting_after(call):
            item = module.graph.call_function(operator.getitem, (call, at))
        item.meta.update(val=output.meta.get("val"), place=output.meta.get("place"))
        output.replace_all_uses_with(item)
    for node in reversed(inside):
        module.graph.erase_node(node)
