"""Tensors that are made up to time a region on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fxopt import optimize
from fxopt.kernels import reports
from fxopt.rewrites.framework.editor import Rejected
from fxopt.rewrites.framework.trial import _reports_of_samples
from fxopt.tune.samples import sample
from fxopt.tune.tuner import Site


def test_integers_in_one_dim_can_be_offsets_of_bags():
    with FakeTensorMode():
        fakes = [
            torch.empty(shape, dtype=dtype) for shape in ((0,), (1,), (50,)) for dtype in (torch.int64, torch.int32)
        ]
        fakes += [torch.empty(30, 4, dtype=torch.int64)]
    *flat, rows = sample(fakes, {})
    for offsets in flat:
        assert (offsets[:1] == 0).all() and (offsets.diff() >= 0).all() and (offsets <= 1).all()
    assert sorted(rows.unique().tolist()) == [0, 1]


def test_what_the_device_reports_of_samples_is_forgotten(monkeypatch):
    with FakeTensorMode():
        site = Site(len, len, [torch.empty(3, device="cuda:0")], None, False)
    pending = ["one of each kernel", "another"]
    monkeypatch.setattr(reports, "reported", lambda device: False)
    monkeypatch.setattr(reports, "failure", lambda device: pending.pop() if pending else None)
    with pytest.raises(ValueError), _reports_of_samples(site):
        raise ValueError
    assert not pending
    monkeypatch.setattr(reports, "reported", lambda device: True)
    with pytest.raises(Rejected, match="earlier call"), _reports_of_samples(site):
        raise AssertionError("nothing is timed, and no earlier call's report taken")


def test_batches_that_nothing_ties_grow_together():
    """reshape(B, -1) of a tensor with another batch: its columns are 8 * s1 // s0, which is 8 where both are one."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(4))
            self.tower = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

        def forward(self, *ids: torch.Tensor) -> torch.Tensor:
            rows = [table(column) for table, column in zip(self.tables, ids, strict=True)]
            user, item = (torch.stack(rows[at : at + 2], 1) for at in (0, 2))
            return self.tower(torch.cat([user.reshape(len(user), -1), item.reshape(len(user), -1)], 1))

    model, ids = Towers().eval(), [torch.randint(0, 9, (33,)) for _ in range(4)]
    fast = optimize(model, tuple(ids))
    (findings,) = fast._fxopt.findings  # type: ignore[union-attr]
    assert not any(ran.rolled_back for ran in findings.passes)
    assert "linear_chains" in {ran.name for ran in findings.passes if ran.changes}
    with torch.no_grad():
        torch.testing.assert_close(fast(*ids), model(*ids))
