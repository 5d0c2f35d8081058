"""The casts of torch.autocast, as operators of the graph: torch's own kernels say them, call by call.

A traced operator arrives before autocast has seen it. Here its autocast kernel runs on the traced tensors, with the
trace watching: it casts them, and calls the operator again, this time beyond autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from fxopt.capture.errors import CaptureError
from fxopt.torch_internals.operators import has_kernel, redispatched

aten = torch.ops.aten
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# They have no autocast kernel, and call products that have one.
_COMPOSED = frozenset({
    aten.einsum.default, aten.tensordot.default, aten.inner.default, aten.bilinear.default, aten.chain_matmul.default,
    aten.linalg_matmul.default, aten.linalg_multi_dot.default, aten.linalg_matrix_power.default,
    aten.matrix_power.default, aten.linalg_vecdot.default, aten.gru_cell.default, aten.lstm_cell.default,
    aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default,
})  # fmt: skip
_CAST_WITHIN = (aten.linalg_pinv, aten.pinverse)  # by kernels of theirs, which a trace does not see


def casts_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """`func` through autocast; None where autocast leaves it alone.

    Raises:
        CaptureError: it casts where no graph can say so.
    """
    devices = {value.device.type for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
    for device in sorted(devices & _KEYS.keys(), reverse=True):  # as the dispatcher has it: CUDA's before the CPU's
        if not torch.is_autocast_enabled(device):
            continue
        if has_kernel(func.name(), _KEYS[device]):
            return redispatched(func, _KEYS[device])
        if func.overloadpacket in _CAST_WITHIN:
            raise CaptureError(f"calls {func.overloadpacket} under autocast, which casts within it")
        if func in _COMPOSED:
            return func.decompose
    return None
