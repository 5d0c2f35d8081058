"""A generous bound: 300 columns of separate inputs take well under a second on an idle core."""

from __future__ import annotations

import time

import torch
from torch import nn

from fxopt.capture import capture


class Bucketized(nn.Module):
    def __init__(self, columns: int):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(101, 8) for _ in range(columns)])
        for i in range(columns):
            self.register_buffer(f"boundaries{i}", torch.linspace(0, 1, 100))

    def forward(self, xs):
        ids = [torch.bucketize(x, getattr(self, f"boundaries{i}")) for i, x in enumerate(xs)]
        return torch.cat([table(i) for table, i in zip(self.tables, ids, strict=True)], -1)


def test_300_columns():
    model = Bucketized(300)
    start = time.process_time()
    found = capture(model, ([torch.rand(1) for _ in range(300)],))
    assert time.process_time() - start < 10
    assert len(found.state) == 600
