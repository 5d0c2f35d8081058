"""Where nn.Module keeps what runs around its forward or in its place: hooks, and what torch.compile made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

COMPILED = "_compiled_call_impl"  # Module.compile() puts it there, and a copy of the module has none

GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    value for name, value in vars(nn_module).items() if name.startswith("_global_") and name.endswith("_hooks")
)


def around_every_forward() -> list[Callable]:
    """The functions that run around the forward of every module of the process."""
    return [*nn_module._global_forward_pre_hooks.values(), *nn_module._global_forward_hooks.values()]


def has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in HOOKS)
