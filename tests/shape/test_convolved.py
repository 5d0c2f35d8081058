"""Values behind convolutions lie in memory as they do in eager, dim by dim."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.shape.convolved import placed_as_convolved


class Images(nn.Module):
    """A causal convolution over a sequence, as in NextItNet, and one over contiguous memory."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(8, 8, (1, 3)), last

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 1) if self.last else x.permute(0, 2, 1).contiguous()
        return self.convolution(F.pad(rows.unsqueeze(2), (2, 0, 0, 0))).squeeze(2).relu()


@pytest.mark.parametrize("last", [True, False])
def test_channels_last_or_not(last: bool) -> None:
    model, x = Images(last).eval(), torch.randn(6, 5, 8)
    with torch.no_grad():
        graph = capture(model, (x,), {}).graph
        normalize(graph, True)
        (output,) = graph.graph.find_nodes(op="output")
        found = placed_as_convolved(output.args[0][0]).stride()
        strides = model(x).stride()
    assert sorted(range(3), key=lambda dim: strides[dim]) == sorted(range(3), key=lambda dim: int(found[dim]))
