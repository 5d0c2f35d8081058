"""Edits of memory that a graph could not repeat, or that others would not see."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fxopt.capture.errors import CaptureError
from fxopt.capture.state import StateSlot
from fxopt.shape.aliases import Aliases, written_arguments
from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.storage import storage_number


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which memory a fake tensor has, and how it lies there."""
    if tensor.layout is not torch.strided:
        return ()
    return storage_number(tensor), tensor.storage_offset(), tensor.ndim, tensor.requires_grad


@functools.cache
def _of_fakes() -> frozenset[str]:
    """The attributes of torch's own."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0, device="cpu"))))


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What users have put on a fake tensor."""
    return {name: held for name, held in vars(tensor).items() if name not in _of_fakes() and not name.startswith("_")}


def check_attributes(tensors: Sequence[torch.Tensor], before: Sequence[dict[str, Any]], results: Sequence[Any]) -> None:
    """Refuse a forward that has put attributes on state, an input or a result, as in `y.task = "ctr"`.

    Args:
        before: `attributes_of` each of `tensors` in front of the trace.
    """
    known = dict(zip(map(id, tensors), before, strict=True))
    for tensor in (*tensors, *(result for result in results if isinstance(result, torch.Tensor))):
        for name, held in attributes_of(tensor).items():
            if name not in known.get(id(tensor), ()) or known[id(tensor)][name] is not held:
                raise CaptureError(f"sets the attribute {name!r} of a tensor, which a graph would not do again")


def check_memory(
    graph: torch.fx.GraphModule,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[tuple[Any, ...]],
    slots: Sequence[StateSlot],
    edited_in_leaves: set[StateSlot],
) -> None:
    """Refuse what a graph cannot keep.

    Args:
        tensors: the fakes of state and inputs, and their `layouts` before the trace.
        edited_in_leaves: state that opaque modules write to, unseen.

    Raises:
        CaptureError: a tensor got other memory; one that is no state was edited; state is read that a leaf edits.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, tensor, before in zip(placeholders, tensors, layouts, strict=True):
        if layout(tensor) != before:
            raise CaptureError(f"gives {_name(node, slots, placeholders)} other memory, or another form")
    for node, slot in zip(placeholders, slots, strict=False):
        if slot in edited_in_leaves and node.users:
            raise CaptureError(f"reads {slot}, which a submodule that stays opaque edits")
    aliases = Aliases(graph.graph)
    for node in graph.graph.nodes:
        written = written_arguments(node) if node.op == "call_function" else ()
        if any(other.op == "get_attr" for argument in written for other in aliases.sharing(argument)):
            raise CaptureError("edits a tensor that is no parameter, buffer or input", node.meta["place"])


def _name(node: torch.fx.Node, slots: Sequence[StateSlot], placeholders: Sequence[torch.fx.Node]) -> str:
    number = list(placeholders).index(node)
    return str(slots[number]) if number < len(slots) else "an input"
