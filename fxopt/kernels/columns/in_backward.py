"""Tables whose optimizer steps in backward by `apply_optimizer_in_backward`: a step on the rows of the batch alone.

Where a row without a gradient stays as it is, the optimizer's own step() runs on a small table of the touched rows and
of their state, which gives eager's bits. Where it does not (momentum, Adam, weight decay), the gradients become dense
one after another, each just before its step: one buffer serves them all, as in eager.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from fxopt.torch_internals.autograd import hooks_of
from fxopt.torch_internals.in_backward import hooks_behind, optimizers_in_backward
from fxopt.torch_internals.optimizer_steps import is_watched

from .row_gradients import rows_of


def is_stepped(table: Tensor) -> bool:
    """Whether an optimizer may step on it in backward."""
    return hasattr(table, "_in_backward_optimizers")


def take(table: Tensor) -> bool:
    """Whether the gradient of this leaf may now be sparse. If so, a hook for this one backward sees to its step."""
    if not is_stepped(table):
        return False
    hooks = hooks_behind(table)
    if any(isinstance(hook, _Hook) for hook in hooks):  # other columns have read it, too
        return True
    optimizers = [] if hooks or hooks_of(table) else optimizers_in_backward(table)
    if not optimizers:
        return False
    hook = _Hook(optimizers)
    hook.handle = table.register_post_accumulate_grad_hook(hook)
    return True


class _Hook:
    """Runs once, before the optimizers step."""

    handle: Any

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers

    def __call__(self, table: Tensor) -> None:
        self.handle.remove()
        grad, optimizers = table.grad, self._optimizers
        if grad is None or not grad.is_sparse:  # something else than columns read the table, too
            return
        rows, grads = rows_of(table, unique=True)
        if len(optimizers) == 1 and _steps_by_row(optimizers[0], table):
            _step_rows(optimizers[0], table, rows, grads)
        else:
            table.grad = torch.zeros_like(table).index_copy_(0, rows, grads)


def _steps_by_row(optimizer: Optimizer, table: Tensor) -> bool:
    """Whether a step changes no row whose gradient is zero, and each other row by its own gradient and state alone."""
    groups = optimizer.param_groups
    if len(groups) != 1 or len(groups[0]["params"]) != 1 or groups[0]["params"][0] is not table:
        return False
    group = groups[0]
    if group["weight_decay"] != 0 or group.get("differentiable") or is_watched(optimizer):
        return False
    if type(optimizer) is SGD:
        return group["momentum"] == 0
    torchrec = sys.modules.get("torchrec.optim.rowwise_adagrad")
    adagrads = (Adagrad, torchrec.RowWiseAdagrad) if torchrec else (Adagrad,)
    return type(optimizer) in adagrads and group["eps"] > 0 and "sum" in optimizer.state[table]


@torch.no_grad()
def _step_rows(optimizer: Optimizer, table: Tensor, rows: Tensor, grads: Tensor) -> None:
    group, state = optimizer.param_groups[0], optimizer.state.get(table, {})
    by_row = [name for name, value in state.items() if isinstance(value, Tensor) and value.shape[:1] == table.shape[:1]]
    few = torch.nn.Parameter(table.index_select(0, rows))
    few.grad = grads
    if state:
        optimizer.state[few] = {**state, **{name: state[name].index_select(0, rows) for name in by_row}}
    group["params"] = [few]
    try:
        optimizer.step()
    finally:
        group["params"] = [table]
        changed = optimizer.state.pop(few, {})
    for name in by_row:
        state[name].index_copy_(0, rows, changed[name])
    table.index_copy_(0, rows, few)
    table.grad = None
