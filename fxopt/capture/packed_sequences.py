"""Recurrent layers over packed sequences (pack_padded_sequence, pad_packed_sequence), which hold no padding.

How many steps they have in all and how long the longest one is depend on data: two sizes of their own. torch's fake
operators ask for both, and its layers read the batch from data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxopt.capture.errors import CaptureError
from fxopt.capture.recurrent import Layers, differentiable, refuse_autocast
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.modes import no_function_modes
from fxopt.torch_internals.operators import pack_padded_sequence, pad_packed_sequence
from fxopt.torch_internals.python_sizes import caller
from fxopt.torch_internals.storage import version_of
from fxopt.torch_internals.symbols import narrow
from fxopt.torch_internals.tracing import disable_proxy_modes_tracing, record_call

if TYPE_CHECKING:
    from fxopt.capture.trace import Tracer

aten = torch.ops.aten
_LAYERS = {
    torch.gru: aten.gru.data,
    torch.lstm: aten.lstm.data,
    torch.rnn_tanh: aten.rnn_tanh.data,
    torch.rnn_relu: aten.rnn_relu.data,
}

# These stand between torch's layers and the mode that asks.
_BETWEEN = {__name__, "fxopt.capture.function_mode", "fxopt.capture.packed"}


class PackedSequences:
    """Of one trace: its batch sizes, [steps], each with the number of sequences."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: list[tuple[Tensor, int, Any]] = []  # with the version, as an edit makes them others

    def rows_of(self, batch_sizes: Any) -> Any:
        """How many sequences begin, which is `batch_sizes[0]`; None for any other value."""
        with no_function_modes():
            found = (
                rows for known, version, rows in self._known if known is batch_sizes and version_of(known) == version
            )
            return next(found, None)

    def _learn(self, batch_sizes: Tensor, rows: Any) -> None:
        with no_function_modes():
            self._known.append((batch_sizes, version_of(batch_sizes), rows))

    def called(self, func: Any, args: Sequence[Any]) -> Any:
        """The results of a call, recorded; None where it has nothing to do with packed sequences."""
        if func is Tensor.__getitem__:
            return self._batch(args[0]) if _is_first(args[1]) and _asks_a_layer() else None
        if func is pack_padded_sequence:
            return self._packed(*args)
        if func is pad_packed_sequence:
            return self._padded(*args)
        if func in _LAYERS and self.rows_of(args[1]) is not None:
            return self._ran(_LAYERS[func], *args)
        return None

    def _batch(self, batch_sizes: Tensor) -> Any:
        """The same; of a packed sequence that comes from elsewhere, such as an input, it is a number to be read."""
        rows = self.rows_of(batch_sizes)
        if rows is None:
            rows = batch_sizes.select(0, 0).item()
            self._learn(batch_sizes, rows)
        return rows

    def _packed(self, x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        if not isinstance(x, FakeTensor) or x.dim() < 2 or lengths.dim() != 1 or lengths.device.type != "cpu":
            return None
        rows = x.shape[0 if batch_first else 1]
        torch._check(rows == lengths.shape[0])
        new: Any = x.fake_mode.shape_env.create_unbacked_symint  # type: ignore[union-attr]
        count, steps = _positive(new()), _positive(new())
        with no_function_modes(), disable_proxy_modes_tracing():
            data = differentiable([x.new_empty((count, *x.shape[2:]))], [x])[0]
            batch_sizes = torch.empty(steps, dtype=torch.int64, device="cpu")
        self._learn(batch_sizes, rows)
        return self._recorded(aten._pack_padded_sequence.default, (x, lengths, batch_first), (data, batch_sizes))

    def _ran(self, operator: Any, x: Tensor, batch_sizes: Tensor, initial: Any, weights: Any, *how: Any) -> Any:
        biased, layers, _, _, bidirectional = how
        torch._check(x.shape[-1] == weights[0].shape[1])  # an LSTM leaves that to its operator
        called = Layers(operator, x, initial, weights, biased, layers, bidirectional)
        refuse_autocast()
        if not called.fit(self.rows_of(batch_sizes)):
            raise CaptureError("runs packed sequences through a recurrent layer with a projection or mixed dtypes")
        with no_function_modes(), disable_proxy_modes_tracing():
            results = called.results((x.shape[0],))
        return self._recorded(operator, (x, batch_sizes, initial, weights, *how), results)

    def _padded(self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: Any, length: Any) -> Any:
        rows = self._batch(batch_sizes)
        with no_function_modes(), disable_proxy_modes_tracing():
            states = differentiable([data.new_empty((length, rows, *data.shape[1:]))], [data])[0]
            results = states.transpose(0, 1) if batch_first else states, batch_sizes.new_empty(rows)
        args = data, batch_sizes, batch_first, padding, length
        return self._recorded(aten._pad_packed_sequence.default, args, results)

    def _recorded(self, operator: Any, args: tuple, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with no_function_modes():
            record_call(operator, args, {}, results, self._tracer)
        return results


def _is_first(index: Any) -> bool:
    return type(index) is int and index == 0


def _asks_a_layer() -> bool:
    return caller(through=_BETWEEN).f_globals.get("__name__") == nn.RNNBase.__module__


def _positive(size: torch.SymInt) -> torch.SymInt:
    narrow(size, 1, sys.maxsize)
    return size
