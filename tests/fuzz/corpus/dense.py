"""What random dense graphs have found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz.corpus.case import graph


@graph(lambda B, L, fill=0.6: (torch.randint(0, 2, (B, 2)),), grad=True)
class MeanOfAComparison(nn.Module):
    """What has no gradient in eager asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.e(ids) > 0).float().mean(2)
