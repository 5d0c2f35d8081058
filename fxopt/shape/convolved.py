"""How a value behind a convolution lies in memory: channels last or not.

Fake convolutions on the CPU are contiguous, also where oneDNN stays with channels last, as behind a permute and a pad.
So a small one is run. What is timed must lie as it will: a copy that eager never makes must not be charged to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.shape.calls import closure, is_pointwise
from fxopt.shape.sizes import expression, tensor_of
from fxopt.torch_internals.fake_tensors import mode_of
from fxopt.torch_internals.symbols import hints_of

aten = torch.ops.aten
_CONVOLUTIONS = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default})
_CARRIERS = frozenset({aten.pad.default, aten.constant_pad_nd.default})


def placed_as_convolved(node: Node) -> Any:
    """The fake value of `node`; behind a convolution, with its dims in the order of real memory."""
    value = node.meta["val"]
    if not _is_convolved(node):
        return value
    try:
        with torch.no_grad():
            strides = _small(node, {}).stride()
    except Exception:  # sizes that small ones do not fit
        return value
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    with mode_of(value):
        return torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device)


def _is_convolved(node: Node) -> bool:
    """Whether a convolution's strides reach it, through views and elementwise operators."""
    behind = closure([node], lambda each: each.all_input_nodes if _carries(each) else ())
    return any(each.target in _CONVOLUTIONS for each in behind)


def _carries(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or tensor_of(node) is None:
        return False
    return target in _CARRIERS or target in _CONVOLUTIONS or target.is_view or is_pointwise(target)


def _small(node: Node, made: dict[Node, Any]) -> Any:
    """The node's value on zeros, with sizes of the capture up to 64."""
    if node not in made:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            made[node] = _number(value)
        elif _carries(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda read: _small(read, made))
            made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            sizes, strides = (tuple(map(_number, each)) for each in (value.shape, value.stride()))
            made[node] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()
    return made[node]


def _number(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    term, hints = expression(size), hints_of(size)
    small = {symbol: min(max(2, int(hints[symbol])), 64) for symbol in term.free_symbols}
    return int(term.subs(small))  # type: ignore[arg-type]
