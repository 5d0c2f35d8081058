"""Who seeds for a while leaves devices that have not started as the user has seeded them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.torch_internals.seeds import seed_started


def test_numbers_are_those_of_the_seed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    seed_started(7)
    assert torch.equal(torch.rand(3), expected)


def test_devices_that_have_not_started_keep_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has started")
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_started(0)
    fxopt.optimize(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), (torch.rand(4, 3),))
    assert seeds == []


def test_cuda_is_seeded_once_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_started(5)
    assert seeds == [5]
