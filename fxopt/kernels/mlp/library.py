"""The library that a chain and its gradient share."""

from __future__ import annotations

from pathlib import Path

from ..operators import cpu_library

MLP = "mlp(Tensor[] inputs, Tensor?[] state, int[] plan) -> Tensor"
LINEAR_BACKWARD = "linear_backward(Tensor grad, Tensor? y, int op) -> Tensor[]"
KERNEL = cpu_library(Path(__file__).parent, "chain.h", "steps.h", (MLP, LINEAR_BACKWARD))
