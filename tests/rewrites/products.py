"""Models whose GEMMs are spelled otherwise, and what looks like them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MatrixOfEachRow(nn.Module):
    """W[D, D] times every row as a column, as matrix cross networks write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        column = x.unsqueeze(2)
        return (column * (torch.matmul(self.weight, column) + self.bias)).squeeze(2)


class OneSidedColumns(MatrixOfEachRow):
    """Both sides of the product depend on the row."""

    def forward(self, x: Tensor) -> Tensor:
        column = x.unsqueeze(2)
        return torch.matmul(column * self.bias.t(), column).squeeze(2)


class OuterProducts(nn.Module):
    """p^T K q of pairs of fields, with [B, D, P, D] written out."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 3, 5))
        self.widen = nn.Parameter(torch.randn(1, 5))

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fields = x.unsqueeze(2) * self.widen
        return fields[:, [0, 0, 1]], fields[:, [1, 2, 2]]

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.pairs(x)
        inner = (p.unsqueeze(1) * self.kernel).sum(-1).transpose(2, 1)
        return (inner * q).sum(-1)


class OuterProductsSeen(OuterProducts):
    """Someone else needs the product that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.pairs(x)
        products = p.unsqueeze(1) * self.kernel
        return (products.sum(-1).transpose(2, 1) * q).sum(-1) + products.amax((1, 3))


class Compressed(nn.Module):
    """A layer of a compressed interaction network: outer product and convolution of kernel 1."""

    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.widen = nn.Parameter(torch.randn(1, 5))
        self.conv = nn.Conv1d(9, 4, kernel)

    def forward(self, x: Tensor) -> Tensor:
        fields = x.unsqueeze(2) * self.widen
        return self.conv(torch.einsum("bhd,bmd->bhmd", fields, fields).reshape(-1, 9, 5)).relu().sum(2)


class CompressedNeighbours(Compressed):
    """A convolution over neighbours."""

    def __init__(self) -> None:
        super().__init__(kernel=2)


class Largest(nn.Module):
    """k-max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.topk(torch.tanh(x.unsqueeze(2) * self.scale), 2, 1)[0]


class LargestWithIndices(Largest):
    """The indices are read too."""

    def forward(self, x: Tensor) -> Tensor:
        largest, where = torch.topk(torch.tanh(x.unsqueeze(2) * self.scale), 2, 1)
        return largest + where


class Recurrent(nn.Module):
    """A session whose steps are numbers."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 2, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.unsqueeze(2))[1].sum(0)


class BothWays(Recurrent):
    """From the last step to the first as well."""

    def __init__(self) -> None:
        super().__init__(both=True)


class CarriedAlong(nn.Module):
    """A dim of size 1 behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        column = self.dense(x).unsqueeze(2)
        return (torch.tanh(column) * self.scale + x.unsqueeze(2)).squeeze(2)


class OfItsOwn(CarriedAlong):
    """The dim was there all along."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.scale) * x.unsqueeze(2)).squeeze(2)


class EachPosition(nn.Module):
    """A feed-forward layer of each position, as convolutions of kernel 1."""

    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.widen = nn.Parameter(torch.randn(1, 5))
        self.first, self.last = nn.Conv1d(5, 4, kernel), nn.Conv1d(4, 5, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first((x.unsqueeze(2) * self.widen).transpose(1, 2)).relu()).transpose(1, 2)


class NeighbouringPositions(EachPosition):
    """Convolutions over neighbours."""

    def __init__(self) -> None:
        super().__init__(kernel=2)
