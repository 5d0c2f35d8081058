"""GRU, LSTM and RNN over sequences of any length: torch's fake ones go from step to step, which fixes the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.known_sizes import expressions
from fxopt.torch_internals.tracing import disable_proxy_modes_tracing, proxy_of, record

aten = torch.ops.aten
GATES = {aten.gru.input: 3, aten.lstm.input: 4, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}


def any_length(func: Any, args: tuple, tracer: Any) -> tuple[torch.Tensor, ...] | None:
    """The results of a call of one of `GATES`, recorded; None where torch would have to check it."""
    if len(args) != 9 or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        return None
    x, initial, weights, biased, layers, _, _, bidirectional, batch_first = args
    states = initial if isinstance(initial, list | tuple) else [initial]
    count = layers * (2 if bidirectional else 1)
    time, rows = reversed(x.shape[:2]) if batch_first else x.shape[:2]
    size = states[0].shape[-1]
    fits = (
        _are_alike([x, *states, *weights])
        and len(weights) == count * (4 if biased else 2)
        and all(expressions(state.shape) == expressions((count, rows, size)) for state in states)
        and expressions(weights[0].shape) == expressions((GATES[func] * size, x.shape[2]))
    )
    if not fits:
        return None

    def traced(value: Any) -> Any:
        return proxy_of(value, tracer) if isinstance(value, torch.Tensor) else value

    taken = tree_map(traced, args)
    if any(proxy is None for proxy in tree_leaves(taken)):
        return None
    proxy = tracer.create_proxy("call_function", func, taken, {}, name=func.overloadpacket.__name__)
    with disable_proxy_modes_tracing():
        differentiated = [tensor.sum() for tensor in (x, *states, *weights) if tensor.requires_grad]
        found = [x.new_empty((time, rows, size * count // layers)), *(state.new_empty(state.shape) for state in states)]
        if torch.is_grad_enabled() and differentiated:
            found = [each + sum(differentiated) for each in found]
        results = (found[0].transpose(0, 1) if batch_first else found[0], *found[1:])
    record(results, proxy, tracer)
    return results


def _are_alike(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return all(
        isinstance(each, FakeTensor) and (each.dtype, each.fake_device) == (first.dtype, first.fake_device)
        for each in tensors
    )
