"""What runs around the steps of optimizers: hooks of the user's, and what fxopt hears of steps with fused=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

_hear: list[Callable[[Tensor], None]] = []


def is_watched(optimizer: Optimizer) -> bool:
    """Whether hooks of the user's run around its step()."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    after = [hook for hook in _global_optimizer_post_hooks.values() if hook is not _stepped]
    return any((*own, _global_optimizer_pre_hooks, after))


def after_fused_steps(hear: Callable[[Tensor], None]) -> None:
    """From now on `hear` is told of each parameter after a step with fused=True, which leaves its version as it was."""
    if _stepped not in _global_optimizer_post_hooks.values():
        register_optimizer_step_post_hook(_stepped)
    _hear.append(hear)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            for hear in _hear:
                hear(parameter)
