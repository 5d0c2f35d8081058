"""fxopt::gru: the steps of a gated recurrent unit (Cho et al., arXiv:1406.1078, in the form of cuDNN and torch.nn.GRU).

torch runs eight operators a step: 50 steps of 64 units take 610 us at batch 1 and 12 ms at 256, one thread, where this
and the linear layer in front of it, which is what the input gives to the gates of all steps, take 49 us and 6.7 ms.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fxopt.facts import Facts

from ..operators import Operator, Operators, cpu_library

_PADDED = "gru(Tensor gates, Tensor initial, Tensor weight, Tensor? bias) -> Tensor"
_PACKED = (
    "packed_gru(Tensor gates, Tensor batch_sizes, Tensor initial, Tensor weight, Tensor? bias) -> (Tensor, Tensor)"
)
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "steps.h", (_PADDED, _PACKED))


def gru(gates: Tensor, initial: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The state behind each step. The kernel's own definition.

    Args:
        gates: [L, B, 3 H], what the input gives to the gates at each step: reset, update, new.
        initial: [B, H]. weight: [3 H, H], and bias [3 H] or None: of the state.

    Returns:
        [L, B, H], contiguous.

    Raises:
        RuntimeError: L is 0.
    """
    if not gates.shape[0]:
        raise RuntimeError("fxopt.gru: expected at least one step")
    state, states = initial, []
    for step in gates.unbind(0):
        state = _next(state, step, weight, bias)
        states.append(state)
    return torch.stack(states)


def packed_gru(
    gates: Tensor, batch_sizes: Tensor, initial: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The states of packed sequences, and the last one of each. The kernel's own definition.

    Args:
        gates: [N, 3 H], step after step, each with as many rows as batch_sizes says.
        batch_sizes: int64 [L], at least 1 and never growing, N together.
        initial, weight, bias: as those of `gru`, for batch_sizes[0] rows.

    Returns:
        [N, H] and [B, H], contiguous.

    Raises:
        RuntimeError: batch_sizes are none.
    """
    sizes = batch_sizes.tolist()
    if not sizes or sizes[-1] < 1 or sizes != sorted(sizes, reverse=True) or sizes[0] != len(initial):
        raise RuntimeError("fxopt.packed_gru: expected the number of rows of each step")
    state, states, last = initial, [], []
    for step in gates.split(sizes):
        last.append(state[len(step) :])
        state = _next(state[: len(step)], step, weight, bias)
        states.append(state)
    return torch.cat(states), torch.cat([state, *reversed(last)])


def _next(state: Tensor, step: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (reset, update, new), (r, u, n) = step.chunk(3, 1), torch.nn.functional.linear(state, weight, bias).chunk(3, 1)
    new = torch.tanh(new + torch.sigmoid(reset + r) * n)
    return (state - new) * torch.sigmoid(update + u) + new


def _fake(gates: Tensor, initial: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return gates.new_empty((gates.shape[0], gates.shape[1], weight.shape[1]))


def _fake_packed(
    gates: Tensor, batch_sizes: Tensor, initial: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    units = weight.shape[1]
    return gates.new_empty((gates.shape[0], units)), gates.new_empty((initial.shape[0], units))


OPERATORS = Operators(
    (Operator(_PADDED, gru, _fake, facts=Facts(rows="axes")), Operator(_PACKED, packed_gru, _fake_packed)), KERNEL
)
