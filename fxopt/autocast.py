"""torch.autocast: how it is set in this thread, and other settings for a while."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.torch_internals.modes import is_any_autocast_enabled

DEVICES = ("cpu", "cuda")
State = tuple[tuple[bool, torch.dtype], ...]  # of each device: whether it casts, and to what


def autocast_state() -> State | None:
    """None where no device casts."""
    if not is_any_autocast_enabled():
        return None
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


def set_autocast(state: State | None) -> None:
    for device, (enabled, dtype) in zip(DEVICES, state or _off(), strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _off() -> State:
    return tuple((False, torch.get_autocast_dtype(device)) for device in DEVICES)


class Autocast:
    """`with Autocast(state):` as it was when `state` was asked for; None switches it off."""

    def __init__(self, state: State | None) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = autocast_state()
        if self._before != self._state:
            set_autocast(self._state)

    def __exit__(self, *error: Any) -> None:
        if self._before != self._state:
            set_autocast(self._before)
