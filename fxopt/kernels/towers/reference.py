"""Tower programs in plain PyTorch: what the kernel computes, and what autograd differentiates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import Copy, Linear, Mixture, Plan, Product, Source, Step

_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def towers(inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """The outputs of a plan, each [..., width] or [..., inner, width / inner]."""
    written: list[dict[int, Tensor]] = [{} for _ in plan.buffers]  # by column

    def read(source: Source, width: int) -> Tensor:
        if not source.is_input:
            return _columns(written[source.tensor], source.start, width)
        x = inputs[source.tensor]
        x = x.select(-2, source.place) if source.place >= 0 else x
        return x if x.shape[-1] == width else x.narrow(-1, source.start, width)

    def value(step: Step) -> Tensor:
        match step:
            case Linear():
                weight = weights[step.weight]
                y = F.linear(read(step.x, weight.shape[1]), weight, None if step.bias < 0 else biases[step.bias])
                return _ACTIVATIONS[step.activation](y)
            case Mixture():
                gate = read(step.gate, len(step.experts))
                gate = gate.softmax(-1) if step.softmax else gate
                experts = torch.stack([read(expert, step.width) for expert in step.experts], -2)
                return (gate.unsqueeze(-2) @ experts).squeeze(-2)
            case Product():
                return read(step.left, step.width) * read(step.right, step.width)
            case Copy():
                return read(step.x, step.width)

    for _, step in plan.steps:
        written[step.buffer][step.column] = value(step)
    results = []
    for buffer, pieces in zip(plan.buffers, written, strict=True):
        if buffer.is_output:
            y = _columns(pieces, 0, buffer.width)
            y = y.unflatten(-1, (buffer.inner, buffer.width // buffer.inner)) if buffer.inner else y
            results.append(y)
    return results


def _columns(pieces: dict[int, Tensor], start: int, width: int) -> Tensor:
    """Columns [start, start + width) of pieces that were written side by side."""
    if start in pieces and pieces[start].shape[-1] == width:
        return pieces[start]
    found = []
    for column, piece in sorted(pieces.items()):
        first, last = max(column, start), min(column + piece.shape[-1], start + width)
        if first < last:
            found.append(piece.narrow(-1, first - column, last - first))
    return found[0] if len(found) == 1 else torch.cat(found, -1)
