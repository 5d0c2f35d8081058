"""Why the optimized graph of a model cannot become a program."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fxopt.capture import Capture
from fxopt.torch_internals.hooks import has_hooks

_PADDED = "give recurrent layers padded sequences instead of packed ones"


class ExportError(RuntimeError):
    """The model cannot be exported. The text says why, with the module path and the source line."""


def obstacles(model: nn.Module, capture: Capture) -> Iterator[str]:
    """What a program cannot hold, one sentence each."""
    if has_hooks(model):
        yield "the model: hooks run around its forward, and a program has none; remove them"
    for leaf in capture.leaves:
        yield (
            f"{leaf.place}: {leaf.path} stays a module of Python, since it cannot be captured: {leaf.reason}. "
            "A program holds tensor operators alone: where values decide, compute all rows and choose with "
            f"torch.where, and {_PADDED}"
        )
    for answer in capture.taken:
        yield f"{answer.place}: {answer.reason}, and a program has none; choose with torch.where or torch.cond"
    for node in capture.graph.graph.find_nodes(op="call_function", target=torch.ops.aten._pack_padded_sequence.default):
        yield f"{node.meta['place']}: torch.export has no program for packed sequences; {_PADDED}"
    for spec, place, first in zip(capture.inputs, range(len(capture.firsts)), capture.firsts, strict=True):
        if place != first:
            yield f"{spec.name} is the same object as {capture.inputs[first].name}; pass two tensors"


def path_in(model: nn.Module, module: nn.Module) -> str:
    return next((path for path, each in model.named_modules() if each is module and path), "the model")
