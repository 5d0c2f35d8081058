"""What the tests of the shape passes share: one rewrite over one function, and a comparison that sees strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites import PASSES

SHAPE_PASSES = ("views", "cats", "identities")
OTHERS = tuple(ran.name for ran in PASSES if ran.name not in SHAPE_PASSES)


class Spelled(nn.Module):
    """A model whose forward is `spelled(self, *inputs)`."""

    def __init__(self, spelled: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.spelled = spelled
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.spelled(self, *inputs)


def optimized(model: nn.Module, *inputs: Tensor) -> tuple[nn.Module, list[str]]:
    """The model through the shape passes alone, and what they say they did."""
    fast = optimize(model, inputs, Config(verify="off", disable=OTHERS))
    (findings,) = fast._fxopt.findings  # type: ignore[union-attr]
    assert not findings.eager_reason
    ours = [ran for ran in findings.passes if ran.name in SHAPE_PASSES]
    assert not [change.why for ran in ours for change in ran.rolled_back]
    return fast, [change.what for ran in ours for change in ran.changes]


def operators(fast: nn.Module) -> list[str]:
    """The operators that are left, by name, in order."""
    graph = fast._fxopt.entries[0].executable.graph.graph  # type: ignore[union-attr]
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    names = [str(target).split(".")[1] for target in targets if isinstance(target, torch._ops.OpOverload)]
    return [name for name in names if name not in ("sym_size", "sym_numel")]


def bits(tensor: Tensor) -> Tensor:
    """Equal only where the bits are: minus zero is not zero, and a NaN is itself."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def strides(tensor: Tensor) -> list[int]:
    """Without those of axes of size 1, which mean nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def assert_alike(found: Any, expected: Any, inputs: Sequence[Tensor] = (), fast_inputs: Sequence[Tensor] = ()) -> None:
    """Same bits, dtype, shape and strides, and the same inputs share their memory with the result."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other, inputs, fast_inputs)
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits(found), bits(expected))
    if expected.numel():
        assert strides(found) == strides(expected)
        shared = [own.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr() for own in inputs]
        kept = [own.untyped_storage().data_ptr() == found.untyped_storage().data_ptr() for own in fast_inputs]
        assert kept == shared
