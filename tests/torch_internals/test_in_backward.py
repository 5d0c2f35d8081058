"""Optimizers of _apply_optimizer_in_backward, as torch hangs them on a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from fxopt.torch_internals.in_backward import optimizers_in_backward

USED = "fxopt/kernels/columns/in_backward.py"


def _seen(table: nn.Parameter, backward: object) -> list:
    found: list = []
    x = torch.ones(1, requires_grad=True)
    out = (x * 1).sum() + table.sum()
    out.grad_fn.register_prehook(lambda *_: found.append(optimizers_in_backward(table)))
    backward(out)  # type: ignore[operator]
    return found[0]


def test_optimizers_are_seen_where_they_step() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    assert _seen(table, torch.Tensor.backward) == []
    _apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1})
    assert _seen(table, torch.Tensor.backward) == table._in_backward_optimizers, f"not found: {USED}"
    assert _seen(table, lambda out: torch.autograd.grad(out, table)) == [], f"autograd.grad steps nothing: {USED}"
    table.view_as(table).grad_fn.next_functions[0][0].register_hook(lambda *_: None)
    assert _seen(table, torch.Tensor.backward) == [], f"somebody else's hook is overlooked: {USED}"


def test_optimizers_whose_hook_is_gone_step_elsewhere() -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    table = nn.Parameter(torch.ones(3, 2))
    _apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1})
    for handle in param_to_optim_hook_handle_map[table]:  # as DistributedDataParallel does
        handle.remove()
    assert _seen(table, torch.Tensor.backward) == [], f"a removed hook is overlooked: {USED}"
