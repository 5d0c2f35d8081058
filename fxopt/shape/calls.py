"""What a node calls, and with what."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Node


def arguments_of(node: Node) -> dict[str, object]:
    """Arguments by name, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(enumerate(node.args)) | dict(node.kwargs)  # type: ignore[arg-type,return-value]
    defaults = _defaults(node.target)
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


@cache
def _defaults(target: torch._ops.OpOverload) -> dict[str, object]:
    return {argument.name: argument.default_value for argument in target._schema.arguments}


def is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Whether its tag says so; torch 2.11 forgot one."""
    return torch.Tag.pointwise in target.tags or target is torch.ops.aten.leaky_relu.default


def packet_of(node: Node) -> Any:
    """The operator that a node calls, whichever overload; None where it calls none."""
    return getattr(node.target, "overloadpacket", None)
