"""Functions of a few square matrices, with parts that need not wait for one another; layers behind each other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from fxopt.kernels.mlp.cuda.linear import CODES


def two_towers(x, *weights):
    left, right = x, x * 2
    for weight in weights:
        left, right = torch.relu(left @ weight), torch.tanh(right @ weight)
    return left + right


class Program:
    """Calls at random: each of a few earlier values, most of them of late ones."""

    def __init__(self, seed: int, size: int = 4) -> None:
        assert size % 4 == 0
        self.size = size
        draw = random.Random(seed)
        self.steps = []
        for step in range(draw.randint(6, 40)):
            count = 4 + step
            near = [max(0, count - 1 - int(draw.expovariate(0.3))) for _ in range(3)]
            self.steps.append((draw.choice("mmmrratvcsx"), near))
        self.outputs = draw.sample(range(4, 4 + len(self.steps)), draw.randint(1, 3))

    def __call__(self, *values: Tensor) -> list[Tensor]:
        known = list(values)
        for kind, (i, j, k) in self.steps:
            a, b, c = known[i], known[j], known[k]
            match kind:
                case "m":
                    new = torch.tanh(a @ b)
                case "r":
                    new = torch.relu(a)
                case "a":
                    new = a + b
                case "t":
                    new = a.t()
                case "v":
                    new = a.view(-1).view(self.size, self.size) if a.is_contiguous() else a.neg()
                case "c":
                    new = torch.cat(
                        [a.narrow(0, 0, self.size // 2), b.narrow(0, 1, self.size // 4), c.narrow(0, 3, self.size // 4)]
                    )
                case "s":
                    new = torch.stack([a, b, c]).mean(0)
                case _:
                    new = a.chunk(2)[1].repeat(2, 1) * c
            known.append(new)
        return [known[output] for output in self.outputs]


def layers(
    sizes: Sequence[int], bias: bool = True, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor | None], list[int]]:
    """Weights, biases and activations of a tower, as gpu_few_rows takes them."""
    weights = [torch.randn(N, K, device=device) / K**0.5 for K, N in itertools.pairwise(sizes)]
    biases = [torch.randn(N, device=device) if bias else None for N in sizes[1:]]
    return weights, biases, [CODES[("relu", "", "sigmoid")[at % 3]] for at in range(len(weights))]
