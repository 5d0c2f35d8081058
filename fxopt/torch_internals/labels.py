"""`torch.profiler.record_function` in a graph: a label around operators, which only a profiler sees.

Beginning and ending one takes 12 us, also while nothing is profiled: it is an object of TorchScript.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

_BEGIN = torch.ops.profiler._record_function_enter_new.default
_END = torch.ops.profiler._record_function_exit._RecordFunction


def begin(name: str, arguments: str | None = None) -> Any:
    """The label, or None where nobody profiles."""
    return _BEGIN(name, arguments) if _profiler_enabled() else None


def end(label: Any) -> None:
    if label is not None:
        _END(label)


WHILE_PROFILED = {_BEGIN: begin, _END: end}
