"""The contract: what a chain of linear layers computes, as data: a list of ints that the kernel interprets."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Op(IntEnum):
    """What a step does to the rows. Names in brackets are its tensors, then its constants."""

    LINEAR = 0  # [weight (N, K), bias (N) or None], 1 where a call that keeps values keeps its own, too
    BATCH_NORM = 1  # [running_mean, running_var, weight or None, bias or None], eps: with running statistics
    RELU = 2
    SIGMOID = 3
    TANH = 4
    SILU = 5
    GELU = 6
    GELU_TANH = 7
    LEAKY_RELU = 8  # slope
    PRELU = 9  # [slope (1) or (N)]
    ELU = 10  # alpha, with scale and input_scale 1
    SOFTPLUS = 11  # beta 1, threshold 20
    CLAMP = 12  # least, most; the gradient passes at a bound
    DICE = 13  # [as BATCH_NORM, slope (1) or (N)], eps: x * (p + slope * (1 - p)), p = sigmoid(batch norm of x)
    LAYER_NORM = 14  # [weight or None, bias or None], eps
    HARDTANH = 15  # least, most; the gradient is 0 at a bound


@dataclass(frozen=True)
class Step:
    """One step. tensors: indices into the call's state, None for what is absent."""

    op: Op
    tensors: tuple[int | None, ...] = ()
    constants: tuple[float, ...] = ()


TENSORS, CONSTANTS = 5, 2
WORDS = 1 + TENSORS + CONSTANTS  # chain.h overlays a struct


def encode(inputs: int, steps: Sequence[Step]) -> list[int]:
    """1 + len(steps) * WORDS numbers: how many inputs; each step's op, tensors (-1: None), constants as doubles."""
    words: list[int] = [inputs]
    for step in steps:
        tensors = [-1 if index is None else index for index in step.tensors]
        constants = (*step.constants, 0.0, 0.0)[:CONSTANTS]
        words += [step.op, *tensors, *[-1] * (TENSORS - len(tensors))]
        words += struct.unpack(f"<{CONSTANTS}q", struct.pack(f"<{CONSTANTS}d", *constants))
    return words


def decode(words: Sequence[int]) -> list[Step]:
    """The steps of an encoded plan, with every tensor and constant slot filled."""
    steps = []
    for at in range(1, len(words), WORDS):
        op, *rest = words[at : at + WORDS]
        tensors = tuple(None if index < 0 else index for index in rest[:TENSORS])
        constants = struct.unpack(f"<{CONSTANTS}d", struct.pack(f"<{CONSTANTS}q", *rest[TENSORS:]))
        steps.append(Step(Op(op), tensors, constants))
    return steps


def joined(plans: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """(how many state tensors, plan) of each chain of one launch on CUDA, as one plan."""
    return [len(plans), *itertools.chain.from_iterable((count, len(plan), *plan) for count, plan in plans)]


def split(plan: Sequence[int]) -> list[tuple[int, list[Step]]]:
    """(how many state tensors, steps) of each chain that was joined."""
    found, at = [], 1
    for _ in range(plan[0]):
        count, length = plan[at : at + 2]
        found.append((count, decode(plan[at + 2 : at + 2 + length])))
        at += 2 + length
    return found
