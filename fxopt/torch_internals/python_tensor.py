"""Python tensors read by C++ of ours: headers that know how they lie in memory, and the check that they still do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

PYTHON_TENSOR = Path(__file__).with_name("python_tensor.h")
PYTHON_CALL = (PYTHON_TENSOR.with_name("python_call.h"), PYTHON_TENSOR)  # what a way past the dispatcher includes


def readable(module: ModuleType) -> bool:
    """Whether a library that includes python_tensor.h reads this torch's tensors right."""
    tensor = torch.empty(1, device="cpu")
    return bool(module.readable(tensor, tensor._cdata))
