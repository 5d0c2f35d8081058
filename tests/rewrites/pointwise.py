"""Models for the passes that make one call of pointwise chains."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.bias = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(1)  # its strides do not follow those of x
        return y * torch.sigmoid(y * self.scale + self.bias)


class GatedOnce(Gated):
    """Two operators: a call would save one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * self.scale + self.bias


class Cross(nn.Module):
    """Two layers of a cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 3))
        self.weight = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = y = x.cumsum(1)
        for _ in range(2):
            y = x * (y @ self.weight) + self.bias + y
        return y


class CrossBehindLayer(Cross):
    """The product ends an MLP, which is one call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(self.layer(x)) @ self.weight) * 2 + self.bias.sum()
