"""Operators that check ids, and repair in place those that are bad: a graph only checks, and bad ids are eager's.

FBGEMM's bounds_check_indices stands in front of its quantized tables. It sets an id outside its table to 0, counts it,
and prints a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxopt.shape.conditions import unless_bad
from fxopt.torch_internals.tracing import proxy_of

_RAISES = {"fbgemm::bounds_check_indices": {"bounds_check_mode": 0}}  # what makes it raise instead


def as_question(func: Any, args: tuple, kwargs: dict[str, Any], tracer: Any) -> bool:
    """Whether a call repairs data; it is then recorded as one that asks. On CUDA a question would end the process."""
    raises = _RAISES.get(func.name())
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if raises is None or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs | raises
    given = [named.get(argument.name, argument.default_value) for argument in func._schema.arguments]
    proxies = [proxy_of(value, tracer) if isinstance(value, torch.Tensor) else None for value in given]
    taken = [value if proxy is None else proxy for value, proxy in zip(given, proxies, strict=True)]
    has_side_effect(unless_bad)
    tracer.create_proxy("call_function", unless_bad, (func, *taken), {}).node.meta["val"] = None
    return True
