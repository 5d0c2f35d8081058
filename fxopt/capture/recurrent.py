"""GRU, LSTM and RNN over sequences of any length: torch's fake ones go from step to step, which fixes the length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxopt.capture.errors import CaptureError
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.known_sizes import expressions
from fxopt.torch_internals.modes import is_any_autocast_enabled
from fxopt.torch_internals.tracing import disable_proxy_modes_tracing, proxy_of, record_call

aten = torch.ops.aten
_GATES = {aten.gru: 3, aten.lstm: 4, aten.rnn_tanh: 1, aten.rnn_relu: 1}
PADDED = frozenset(layer.input for layer in _GATES)


def any_length(func: Any, args: tuple, tracer: Any) -> tuple[Tensor, ...] | None:
    """The results of a call of one of `PADDED`, recorded; None where torch would have to check it.

    Raises:
        CaptureError: autocast would cast within the operator, where no graph says so.
    """
    refuse_autocast()
    if len(args) != 9 or not isinstance(args[0], Tensor) or args[0].ndim != 3:
        return None
    x, initial, weights, biased, layers, _, _, bidirectional, batch_first = args
    called = Layers(func, x, initial, weights, biased, layers, bidirectional)
    time, rows = reversed(x.shape[:2]) if batch_first else x.shape[:2]
    if not called.fit(rows):
        return None
    if any(isinstance(value, Tensor) and proxy_of(value, tracer) is None for value in tree_leaves(args)):
        return None
    with disable_proxy_modes_tracing():
        states, *last = called.results((time, rows))
        results = (states.transpose(0, 1) if batch_first else states, *last)
    record_call(func, args, {}, results, tracer)
    return results


def refuse_autocast() -> None:
    if is_any_autocast_enabled():
        raise CaptureError("runs a recurrent layer under autocast")


@dataclass(frozen=True)
class Layers:
    """What one call of a recurrent operator is given, of padded or of packed sequences."""

    operator: Any
    x: Tensor
    initial: Any
    weights: Sequence[Tensor]
    biased: bool
    layers: int
    bidirectional: bool

    @property
    def _states(self) -> Sequence[Tensor]:
        return self.initial if isinstance(self.initial, list | tuple) else [self.initial]

    @property
    def _count(self) -> int:
        return self.layers * (2 if self.bidirectional else 1)

    def fit(self, rows: Any) -> bool:
        """Whether torch would take them: tensors of one dtype and device whose sizes fit as they are spelled."""
        states, size = self._states, self._states[0].shape[-1]
        gates = _GATES[self.operator.overloadpacket] * size
        return (
            _are_alike([self.x, *states, *self.weights])
            and len(self.weights) == self._count * (4 if self.biased else 2)
            and all(expressions(state.shape) == expressions((self._count, rows, size)) for state in states)
            and expressions(self.weights[0].shape) == expressions((gates, self.x.shape[-1]))
        )

    def results(self, leading: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The states of `leading` sizes, contiguous, and the last ones of each kind."""
        states = self._states
        width = states[0].shape[-1] * self._count // self.layers
        found = [self.x.new_empty((*leading, width)), *(state.new_empty(state.shape) for state in states)]
        return tuple(differentiable(found, [self.x, *states, *self.weights]))


def differentiable(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The results of an operator, made from nothing, as autograd knows them where it was given these."""
    asking = [tensor.sum() for tensor in given if tensor.requires_grad]
    if not (torch.is_grad_enabled() and asking):
        return list(results)
    return [result + sum(asking) for result in results]


def _are_alike(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return all(
        isinstance(each, FakeTensor) and (each.dtype, each.fake_device) == (first.dtype, first.fake_device)
        for each in tensors
    )
