"""Fake tensors, which have sizes and no data, and what torch raises where those would be needed."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they log what we handle


def is_of_a_key(error: Exception) -> bool:
    """Whether code has asked a dict or a set for a size, or for a number that data tells."""
    return isinstance(error, TypeError) and str(error).startswith("unhashable type: non-nested Sym")


def is_of_nested(error: Exception) -> bool:
    """Whether torch's code of nested tensors has raised it: what it says speaks of the trace."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("torch.nested") for frame in frames)


def mode_of(value: object) -> Any:
    """The mode that a fake tensor lives in; None for any other value."""
    return getattr(value, "fake_mode", None)


def without_guards(mode: Any) -> AbstractContextManager:
    """What the fake tensors of a mode are asked about sizes is answered, and becomes no guard."""
    environment = getattr(mode, "shape_env", None)
    return environment.suppress_guards() if environment else nullcontext()


def as_parameter(tensor: torch.Tensor) -> None:
    """isinstance(tensor, nn.Parameter) holds from now on."""
    tensor._is_param = True  # type: ignore[attr-defined]


def quieten(let_through: Callable[[logging.LogRecord], bool]) -> None:
    """Ask this about all that fake tensors and symbol tables log, for ever; asking for it again changes nothing."""
    for noisy in _NOISY:
        logging.getLogger(noisy).addFilter(let_through)
