"""Where nn.Module keeps the hooks that run around its forward."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in HOOKS)
