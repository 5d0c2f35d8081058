"""Results of calls that are alike, worked out once: hundreds of layers of the same sizes are one question about sizes.

torch decomposes a linear of three dims to find the form of its result: 19 ms each, 650 times in FiBiNET.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxopt.shape.sizes import expression

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
        if func not in _FRESH or kwargs or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
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
        proxies = tuple(slot.proxy if (slot := self._slot(value)) is not None else value for value in args)
        name = self._tracer.graph._target_to_str(func.overloadpacket.__name__)
        proxy = self._tracer.create_proxy("call_function", func, proxies, {}, name=name)
        with proxy_tensor.disable_proxy_modes_tracing():
            out = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        proxy_tensor.track_tensor_tree(out, proxy, constant=None, tracer=self._tracer)
        return out

    def _form(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            if value.dim() == 0 or value.layout is not torch.strided or self._slot(value) is None:
                return None
            sizes, strides = tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))
            return sizes, strides, value.dtype, value.device
        return (type(value), value) if isinstance(value, int | float | bool) or value is None else None

    def _slot(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return proxy_tensor.get_proxy_slot(value, self._tracer, None)
