"""Python tensors read by C++ of ours, which includes python_tensor.h: the check that they still lie so in memory."""

from __future__ import annotations

from types import ModuleType

import torch


def readable(module: ModuleType) -> bool:
    """Whether a library that includes python_tensor.h reads this torch's tensors right."""
    tensor = torch.empty(1, device="cpu")
    return bool(module.readable(tensor, tensor._cdata))
