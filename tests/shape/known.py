"""What is claimed of the last value of a small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt.normalize import normalize
from fxopt.shape.ranges.analysis import Known, Ranges


class Inputs(NamedTuple):
    """All of [B, 3]: int64, int32, int8, uint8, float32, bool; `lengths`, `e` and `row` are state."""

    i: Tensor
    k: Tensor
    s: Tensor
    u: Tensor
    x: Tensor
    m: Tensor

    @property
    def b(self) -> Tensor:
        """In [0, 100]."""
        return torch.bucketize(self.x, torch.arange(100.0))


Program = Callable[[Inputs], Tensor]


def traced(program: Program, static: bool = True) -> GraphModule:
    """Normalized, with static sizes or symbolic ones."""
    B = 5
    sample = Inputs(
        torch.zeros(B, 3, dtype=torch.int64), torch.zeros(B, 3, dtype=torch.int32), torch.zeros(B, 3, dtype=torch.int8),
        torch.zeros(B, 3, dtype=torch.uint8), torch.zeros(B, 3), torch.zeros(B, 3, dtype=torch.bool),
    )  # fmt: skip
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(tensor, static_shapes=static) for tensor in sample]
    module = make_fx(lambda *t: program(Inputs(*t)), tracing_mode="symbolic", pre_dispatch=True)(*fakes)
    normalize(module, inference=True)
    return module


def known(program: Program, static: bool = True) -> Known:
    module = traced(program, static)
    output = next(iter(reversed(module.graph.nodes)))
    return Ranges(module.graph).of(output.args[0])
