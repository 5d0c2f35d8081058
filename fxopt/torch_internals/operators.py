"""The dispatcher, and operators whose names begin with an underscore or that have a shorter way in C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _addmm_activation as addmm_activation
from torch import _foreach_zero_ as foreach_zero_
from torch import _pack_padded_sequence as pack_padded_sequence
from torch import _pad_packed_sequence as pad_packed_sequence
from torch import _softmax_backward_data as softmax_backward
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel  # type: ignore[attr-defined]
from torch._C import _nn as nn_bindings  # where F.linear, F.gelu and their kin live
from torch._C import parse_schema
from torch._ops import OperatorBase, OpOverloadPacket
from torch.library import Library

OPERATORS = (OperatorBase, OpOverloadPacket)  # what they hold are torch's caches, which each use fills
destroy = Library._destroy  # takes back all that a library has defined


def redispatched(operator: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """The kernel that an operator has for this dispatch key."""
    return functools.partial(operator.redispatch, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))
