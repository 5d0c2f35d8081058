"""The library that the interaction kernels share."""

from __future__ import annotations

from pathlib import Path

from ..operators import cpu_library

DOTS = (
    "dot_interaction(Tensor[] vectors, Tensor[] before, Tensor[] after, Tensor i, Tensor j) -> Tensor",
    "dot_interaction_backward(Tensor grad, Tensor i, Tensor j, Tensor[] vectors, int at) -> Tensor[]",
)
PAIR_SUM = (
    "pair_sum(Tensor x, Tensor? weights, float scale, bool total) -> Tensor",
    "pair_sum_backward(Tensor grad, Tensor x, Tensor? weights, float scale, bool total) -> Tensor[]",
)
PAIR_ATTENTION = (
    "pair_attention(Tensor x, Tensor i, Tensor j, Tensor weight, Tensor? bias, Tensor query, Tensor? query_bias)"
    " -> (Tensor, Tensor)"
)
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "kernels.h", (*DOTS, *PAIR_SUM, PAIR_ATTENTION))
