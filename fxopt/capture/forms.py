"""Results of calls that are alike, worked out once: hundreds of layers of the same sizes are one question about sizes.

torch decomposes a linear of three dims to find the form of its result: 19 ms each, 650 times in FiBiNET.
"""

from __future__ import annotations

from typing import Any

import torch

from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.modes import is_any_autocast_enabled
from fxopt.torch_internals.symbols import expression
from fxopt.torch_internals.tracing import call_proxy, disable_proxy_modes_tracing, proxy_of, record

aten = torch.ops.aten
# Their results are memory of their own, and their form follows from the forms of the arguments.
_FRESH = frozenset(
    {
        aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
        aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor,
        aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    }
)  # fmt: skip


class Forms:
    """Of one trace. What the first call of its kind asked about sizes has become guards; the others would ask it again.

    Only without gradients, where a fake result has no history.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._known: dict[Any, tuple] = {}

    def key(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        """Equal for calls with results of equal forms; None where that is not known."""
        if func not in _FRESH or kwargs or torch.is_grad_enabled() or is_any_autocast_enabled():
            return None
        forms = tuple(map(self._form, args))
        return None if None in forms else (func, torch.is_inference_mode_enabled(), forms)

    def learn(self, key: Any, out: Any) -> None:
        if key is not None and isinstance(out, FakeTensor):
            self._known[key] = tuple(out.shape), out.stride(), out.dtype, out.device

    def again(self, key: Any, args: tuple) -> torch.Tensor | None:
        """The result of a call like one before, recorded. None for the first of its kind."""
        known = self._known.get(key) if key is not None else None
        if known is None:
            return None
        func, (sizes, strides, dtype, device) = key[0], known
        proxy = call_proxy(func, args, self._tracer)
        with disable_proxy_modes_tracing():
            out = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        record(out, proxy, self._tracer)
        return out

    def _form(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if value.dim() == 0 or value.layout is not torch.strided or proxy_of(value, self._tracer) is None:
                return None
            sizes, strides = tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))
            return sizes, strides, value.dtype, value.device
        return (type(value), value) if isinstance(value, int | float | bool) or value is None else None
