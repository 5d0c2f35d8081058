"""The ambient state of a call: what a capture depends on."""

from __future__ import annotations

from torch import get_default_device, get_default_dtype, is_grad_enabled

from fxopt.autocast import autocast_state
from fxopt.torch_internals.modes import function_modes


def ambient() -> tuple:
    """Global state that changes what operators compute, or (grad mode) which rewrites are valid.

    Equal tuples allow the same capture.
    """
    return (
        is_grad_enabled(),
        get_default_dtype(),
        autocast_state(),
        get_default_device() if function_modes() else None,
    )
