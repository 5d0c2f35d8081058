"""Models and arguments are made on the CPU, whose numbers they keep on the default device.

There, ids out of a table's rows are an assertion that ends the process: eager is asked on the CPU what may be called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")


def elsewhere() -> bool:
    """Whether the default device is none of a CPU."""
    return torch.get_default_device().type != "cpu"


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy on `device`, with the tensors that are plain attributes."""
    model = copy.deepcopy(model).to(device)
    for module in model.modules():
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        vars(module).update(pytree.tree_map_only(Tensor, lambda t: placed(t, device), plain))
    return model


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose tensors are made on the CPU."""

    def made(*args: Any) -> Any:
        with CPU:
            return function(*args)

    return made


def on_default(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`function`, whose tensors are made on the CPU and moved from there."""

    def made(*args: Any) -> tuple[Tensor, ...]:
        return tuple(placed(t, torch.get_default_device()) for t in on_cpu(function)(*args))

    return made if elsewhere() else function


def settled() -> None:
    """Waits for the device.

    Raises:
        torch.AcceleratorError: something has failed on it, and nothing will run there any more.
    """
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def is_spoilt() -> bool:
    try:
        settled()
    except torch.AcceleratorError:
        return True
    return False
