"""Which chains of linear layers each kernel computes in one call, and which single layers gain from a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .plan import Op

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # that the CUDA kernels know
SHORT_IN, LONG_IN = 64, 256  # inputs of a single layer: the longest short dot product, and the shortest long one
LONG_PIECE = 1024  # of the inputs, that is worth not to be joined with the others
# chains.cu's: outputs of a layer, inputs of a first one, which a block reads all by itself, and chains of a launch
MOST_OUT, MOST_IN, MOST_CHAINS = 128, 1024, 12
MOST_ROWS, MOST_LAYERS, VECTOR = 16, 16, 4  # few_rows.cu's: rows, layers, and floats that are read at a time
MOST_GROUPED = 64  # grouped.cu's: inputs and outputs of a product, whose matrix takes 17 KB of shared memory


@dataclass(frozen=True)
class Cut:
    """The chains that one call of a kernel computes: a search cuts what it finds in a graph into such chains.

    Attributes:
        device, dtypes: of all tensors.
        between: what may be done to the rows between two layers, and behind the last one.
        in_front: whether that may also be done in front of the first layer, and several inputs be read side by side.
        launched: whether chains are taken that an earlier pass gave a launch of their own.
        gradients: whether the operator has any.
        most_in, most_out: inputs of the first layer, and outputs of each.
        aligned: what the inputs of each layer are a multiple of.
        most_layers: of a chain.
        fewest: nodes that a chain must replace where it has a call to itself.
        together: chains of one call, which need not wait for one another.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    between: frozenset[Op] = frozenset()
    in_front: bool = False
    launched: bool = False
    gradients: bool = False
    most_in: float = math.inf
    most_out: float = math.inf
    aligned: int = 1
    most_layers: float = math.inf
    fewest: int = 2
    together: int = 1


LONGEST = Cut("cpu", (torch.float32,), frozenset(Op), in_front=True, gradients=True, fewest=1)
NARROW = Cut("cuda", FLOATS, frozenset(Op) - {Op.LAYER_NORM}, most_in=MOST_IN, most_out=MOST_OUT, together=MOST_CHAINS)
FEW_ROWS = Cut("cuda", (torch.float32,), launched=True, aligned=VECTOR, most_layers=MOST_LAYERS)
