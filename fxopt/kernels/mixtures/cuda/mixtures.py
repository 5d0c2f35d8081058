"""fxopt::gpu_mixtures: sums of experts that a softmax weighs, several of them in one launch, without gradients.

The mixtures of experts of MMoE (Ma et al., KDD 2018) and of PLE (Tang et al., RecSys 2020). By PyTorch each one is a
stack of its experts, a softmax and a batched product.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from ...operators import BY_ROWS, Operator, Operators
from ..serves import MOST_EXPERTS, MOST_MIXTURES, MOST_WEIGHTS, mixes

KERNEL = cuda_build.beside(__file__, "fxopt_gpu_mixtures", "fxopt_mixtures")


def reference(logits: Sequence[Tensor], experts: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """What the model wrote."""
    weights = (each.softmax(1).unsqueeze(1) for each in logits)
    stacks = (torch.stack([experts[number] for number in own], 1) for own in _each(logits, numbers))
    return [torch.bmm(left, right).squeeze(1) for left, right in zip(weights, stacks, strict=True)]


def gpu_mixtures(logits: Sequence[Tensor], experts: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """One mixture a tensor of logits [B, K]: sum over k of softmax(logits, 1)[:, k] times its k-th expert, [B, D].

    Args:
        experts: [B, D] each.
        numbers: of each mixture's K experts, one mixture behind the other.
    """
    kernel = cuda_build.loaded(KERNEL, logits[0].get_device()) if _fits(logits, experts, numbers) else None
    if kernel is None:
        return reference(logits, experts, numbers)
    outputs = _fake(logits, experts, numbers)
    if outputs[0].numel():
        cuda_call.launch(kernel.fxopt_mixtures, parameters(logits, experts, numbers, outputs), logits[0])
    return outputs


def _fake(logits: Sequence[Tensor], experts: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    return [each.new_empty(each.shape[0], experts[0].shape[1]) for each in logits]


def parameters(
    logits: Sequence[Tensor], experts: Sequence[Tensor], numbers: Sequence[int], outputs: Sequence[Tensor]
) -> bytes:
    """mixtures.cu's Mixtures."""
    operands = cuda_call.operands(logits, MOST_MIXTURES) + cuda_call.operands(experts, MOST_EXPERTS)
    addresses = struct.pack(f"<{len(outputs)}q", *(out.data_ptr() for out in outputs)).ljust(8 * MOST_MIXTURES, b"\0")
    own = b"".join(bytes(each).ljust(MOST_WEIGHTS, b"\0") for each in _each(logits, numbers))
    weights = bytes(each.shape[1] for each in logits).ljust(MOST_MIXTURES, b"\0")
    sizes = struct.pack("<4i", *experts[0].shape, len(logits), len(experts))
    return operands + addresses + own.ljust(MOST_MIXTURES * MOST_WEIGHTS, b"\0") + weights + sizes


def _each(logits: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """The numbers of each mixture's experts."""
    ends = itertools.accumulate(each.shape[1] for each in logits)
    return (numbers[end - each.shape[1] : end] for each, end in zip(logits, ends, strict=True))


def _fits(logits: Sequence[Tensor], experts: Sequence[Tensor], numbers: Sequence[int]) -> bool:
    tensors = [*logits, *experts]
    if not mixes(len(logits), len(experts)) or any(t.dim() != 2 for t in tensors) or not cuda_call.alike(tensors):
        return False
    weights, (B, D) = [each.shape[1] for each in logits], experts[0].shape
    sizes = all(len(each) == B for each in logits) and all(each.shape == (B, D) for each in experts)
    known = sum(weights) == len(numbers) and all(0 <= number < len(experts) for number in numbers)
    fits = all(0 < weight <= MOST_WEIGHTS for weight in weights) and B * D < 1 << 31
    close = D == 1 or all(each.stride(1) == 1 for each in experts)
    return sizes and known and fits and close and logits[0].dtype is torch.float32


_SCHEMA = "gpu_mixtures(Tensor[] logits, Tensor[] experts, int[] numbers) -> Tensor[]"
OPERATORS = Operators((Operator(_SCHEMA, reference, _fake, facts=BY_ROWS),), cuda=KERNEL)
