"""Optimizers that torch.distributed.optim._apply_optimizer_in_backward (and TorchRec's) has hung on a parameter."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def optimizers_in_backward(leaf: Tensor) -> list[Optimizer]:
    """Those that step as soon as this backward has accumulated the gradient of `leaf`, which then becomes None.

    None of them where the gradient goes elsewhere: to no AccumulateGrad (`torch.autograd.grad`), to other hooks behind
    it, or to DistributedDataParallel, which steps on the gradients of all ranks.
    """
    optimizers = getattr(leaf, "_in_backward_optimizers", None)
    hung = sys.modules.get(_MODULE)
    if not optimizers or hung is None:
        return []
    handles = hung.param_to_optim_hook_handle_map.get(leaf, [])  # type: ignore[attr-defined]
    own = {handle.id for handle in handles}
    hooks = {number for handle in handles for number in handle.hooks_dict_ref() or ()}
    if len(own) != len(optimizers) or hooks != own:
        return []
    return list(optimizers) if _accumulates(hung.param_to_acc_grad_map[leaf]) else []  # type: ignore[attr-defined]


def hooks_behind(leaf: Tensor) -> list[Any]:
    """What `register_post_accumulate_grad_hook` has hung on it."""
    return list((leaf._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def _accumulates(node: torch.autograd.graph.Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf that torch.autograd.grad is asked for
        return False
