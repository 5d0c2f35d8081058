"""Models on a GPU that are mostly dense: attention, experts, crosses; fp32, whose products are TF32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.dense_models import ROWS, entries
from bench.gpu_cases import Case, to_gpu, whole

BATCHES = (256, 2048)
SECONDS = (5.0, 60.0)


class DCNv2(nn.Module):
    """Crosses with a matrix, then an MLP on top (Wang et al., arXiv:2008.13535, stacked).

    forward(dense [B, 13], ids int64 [B, 26]) -> [B, 1].
    """

    def __init__(self, dim: int = 16, crosses: int = 3, deep: tuple[int, ...] = (512, 256)) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, dim) for _ in range(26))
        width = 13 + 26 * dim
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(crosses))
        layers = [(nn.Linear(n_in, n_out), nn.ReLU()) for n_in, n_out in pairwise((width, *deep))]
        self.top = nn.Sequential(*(part for layer in layers for part in layer), nn.Linear(deep[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = torch.cat([dense, *(table(ids[:, t]) for t, table in enumerate(self.tables))], dim=1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return torch.sigmoid(self.top(x))


def dense_cases() -> Iterator[Case]:
    known = {entry.name: entry for entry in entries()}
    for name in ("MMoE", "DIN"):
        model = known[name].make_model().cuda()
        for batch in BATCHES:
            inputs = to_gpu(known[name].make_inputs(batch, 0, model))
            yield whole(name, batch, model, inputs, _tables(model), SECONDS)
    torch.manual_seed(0)
    crosses = DCNv2().eval().cuda()
    for batch in BATCHES:
        inputs = torch.randn(batch, 13, device="cuda"), torch.randint(0, ROWS, (batch, 26), device="cuda")
        yield whole("DCN-v2", batch, crosses, inputs, _tables(crosses), SECONDS)


def _tables(model: nn.Module) -> float:
    """Bytes of tables so small that each is read once."""
    return float(sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Embedding)))
