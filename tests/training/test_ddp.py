"""DistributedDataParallel keeps its own forward around an optimized module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxopt
from fxopt.runtime import dispatcher_of
from tests.launch import launch, outputs

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def _nccl() -> Any:
    few = torch.cuda.device_count() < 2 or not dist.is_nccl_available()
    return pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(few, reason="needs nccl and two GPUs")])


@pytest.mark.parametrize("backend", ["gloo", _nccl()])
def test_two_ranks_train_as_in_eager(backend: str) -> None:
    ranks = launch(["-m", "tests.training.ranks", backend])
    texts = outputs(ranks)
    assert not any(rank.returncode for rank in ranks), "\n".join(texts)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_wrapper_is_a_drop_in() -> None:
    module = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 1))
    wrapper = DistributedDataParallel(module)
    optimized = fxopt.optimize(wrapper, (torch.randint(0, 10, (6, 2)),))
    assert isinstance(optimized, DistributedDataParallel) and type(wrapper) is DistributedDataParallel
    assert optimized.state_dict().keys() == wrapper.state_dict().keys()
    assert optimized.module.state_dict().keys() == module.state_dict().keys()
    assert len(dispatcher_of(optimized.module).entries) == 1, "example inputs are captured"
    assert "embedding_columns" in str(fxopt.report(optimized))
    for mode in (False, True):
        assert optimized.train(mode).training == module.training == module[1].training == mode
    with optimized.no_sync():
        assert not wrapper.require_backward_grad_sync


@pytest.mark.usefixtures("alone")
def test_copies_wrap_a_copy() -> None:
    ids = torch.randint(0, 10, (6, 2))
    optimized = fxopt.optimize(DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 1))))
    for twin in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert isinstance(twin, type(optimized)) and isinstance(twin.module, type(optimized.module))
        torch.testing.assert_close(twin(ids), optimized(ids))
        twin(ids).sum().backward()
        assert all(p.grad is None for p in optimized.parameters()) and all(
            p.grad is not None for p in twin.parameters()
        )
        assert [id(p) for p in twin.parameters()] == [id(p) for p in twin.module.parameters()]
    assert fxopt.optimize(optimized) is optimized
