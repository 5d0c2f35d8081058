"""The ambient state of a call: what a capture depends on."""

from __future__ import annotations

import torch

from fxopt.torch_internals.modes import function_modes, is_any_autocast_enabled


def ambient() -> tuple:
    """Global state that changes what operators compute, or (grad mode) which rewrites are valid.

    Equal tuples allow the same capture.
    """
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _autocast() if is_any_autocast_enabled() else None,
        torch.get_default_device() if function_modes() else None,
        torch.distributed.is_available() and torch.distributed.is_initialized(),  # what a forward may ask, too
    )


def _autocast() -> tuple:
    devices = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
