"""Chains of narrow layers on a GPU, without gradients: one launch for some of them, 16 rows a block through all layers.

Sums are fp32 whatever the dtype, on the CUDA cores; whether that beats a cuBLAS call for each layer depends on rows,
widths and TF32, so a trial on the device decides.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from .. import reference
from ..plan import TENSORS, Op, Step, split
from ..serves import MOST_OUT

KERNEL = cuda_build.beside(__file__, "fxopt_cuda_mlp", "fxopt_mlp")
MOST_STEPS, MOST_OPERANDS = 24, 48  # chains.cu's
_STEP = f"<3i{TENSORS}i2f"


class Chains:
    """The operator for some plans, one a chain, which keeps what it encoded for the shapes that it saw last."""

    def __init__(self, plan: Sequence[int]) -> None:
        self._chains = split(plan)
        self._known: tuple[object, list[bytes] | None] = (None, None)

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor], plan: object) -> list[Tensor]:
        """As `fxopt::mlp_chains` on CUDA; layer by layer where the kernel cannot serve."""
        states = _states(state, self._chains)
        steps = self._encoded(inputs, states) if cuda_call.alike((*inputs, *state)) else None
        kernel = cuda_build.loaded(KERNEL, inputs[0].get_device()) if steps is not None else None
        if steps is None or kernel is None:
            return _layers(inputs, states, self._chains)
        outputs = [
            x.new_empty(x.shape[0], width_of(own, chain))
            for x, own, (_, chain) in zip(inputs, states, self._chains, strict=True)
        ]
        cuda_call.launch(kernel.fxopt_mlp, parameters(inputs, outputs, states, steps), inputs[0])
        return outputs

    def _encoded(self, inputs: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> list[bytes] | None:
        if any(x.dim() != 2 or x.shape[0] != inputs[0].shape[0] for x in inputs):
            return None
        shapes = [(x.shape[1], [t.shape for t in own]) for x, own in zip(inputs, states, strict=True)]
        known = self._known  # another thread may replace it
        if known[0] != shapes:
            found = [encode(steps, width, own) for (_, steps), (width, own) in zip(self._chains, shapes, strict=True)]
            known = self._known = shapes, None if None in found else found  # type: ignore[assignment]
        return known[1]


def _states(state: Sequence[Tensor], chains: Sequence[tuple[int, object]]) -> list[Sequence[Tensor]]:
    ends = itertools.accumulate(count for count, _ in chains)
    return [state[end - count : end] for end, (count, _) in zip(ends, chains, strict=True)]


def _layers(
    inputs: Sequence[Tensor], states: Sequence[Sequence[Tensor]], chains: Sequence[tuple[int, Sequence[Step]]]
) -> list[Tensor]:
    return [
        reference.mlp([x], own, steps).contiguous() for x, own, (_, steps) in zip(inputs, states, chains, strict=True)
    ]


def width_of(state: Sequence[Tensor], steps: Sequence[Step]) -> int:
    """How many columns a chain leaves."""
    last = next(step.tensors[0] for step in reversed(steps) if step.op == Op.LINEAR)
    assert last is not None
    return state[last].shape[0]


def parameters(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], states: Sequence[Sequence[Tensor]], steps: Sequence[bytes]
) -> bytes:
    """chains.cu's Request."""
    parts = [struct.pack("<2i", len(inputs), 0)]
    for x, out, state, encoded in zip(inputs, outputs, states, steps, strict=True):
        parts += [cuda_call.operands((x, out, *state), MOST_OPERANDS), struct.pack("<i", x.shape[0]), encoded]
    return b"".join(parts)


def encode(steps: Sequence[Step], width: int, state: Sequence[torch.Size]) -> bytes | None:
    """Their number and the steps as chains.cu reads them, for rows and state of these sizes; None: it cannot serve."""
    if len(steps) > MOST_STEPS or len(state) > MOST_OPERANDS - 2 or steps[0].op != Op.LINEAR:
        return None
    encoded, N = b"", width
    for step in steps:
        K, tensors = N, [None if at is None else state[at] for at in step.tensors]
        if step.op == Op.LINEAR:
            weight, *tensors = tensors
            if weight is None or len(weight) != 2 or weight[1] != K or not 0 < weight[0] <= MOST_OUT or K == 0:
                return None
            N = weight[0]
        if step.op == Op.LAYER_NORM or any(t is not None and tuple(t) not in ((N,), (1,)) for t in tensors):
            return None
        numbers = (-1 if at is None else at + 2 for at in (*step.tensors, *(None,) * TENSORS)[:TENSORS])
        encoded += struct.pack(_STEP, step.op, N, K, *numbers, *(*step.constants, 0.0, 0.0)[:2])
    return struct.pack("<i", len(steps)) + encoded.ljust(MOST_STEPS * struct.calcsize(_STEP), b"\0")


def _in_pytorch(inputs: Sequence[Tensor], state: Sequence[Tensor], plan: Sequence[int]) -> list[Tensor]:
    chains = split(plan)
    return _layers(inputs, _states(state, chains), chains)


_SCHEMA = "mlp_chains(Tensor[] inputs, Tensor[] state, int[] plan) -> Tensor[]"
OPERATORS = Operators((Operator(_SCHEMA, _in_pytorch, facts=BY_ROWS),), cuda=KERNEL)
