"""What the report says of a call: its inputs, and why a capture of it failed."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch import Tensor, nn

from fxopt import trees
from fxopt.runtime.undo import TooMuch


def reason_of(error: Exception) -> str:
    """A failed compile for the report: a CaptureError says where by itself, any other error gets its last line."""
    from fxopt.capture import CaptureError

    if isinstance(error, CaptureError | TooMuch):
        return str(error)
    *_, last = traceback.extract_tb(error.__traceback__)
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"the capture failed in {last.name} at {'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}: {message}"


def described(model: nn.Module, args: tuple, kwargs: dict) -> str:
    """The inputs of one call as a person writes them: "float32[64, 13], int64[64, 26]; eval"."""
    tensors = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    inputs = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{_sizes(t)}" for t in tensors)
    return f"{inputs}; {'train' if model.training else 'eval'}"


def _sizes(tensor: Tensor) -> str:
    return "[nested]" if tensor.is_nested else str(list(tensor.shape))
