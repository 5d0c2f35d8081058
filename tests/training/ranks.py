"""One of two ranks: trains the same models with DistributedDataParallel, eagerly and optimized, and compares them.

The argument is the backend: gloo, or nccl with a GPU for each rank.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxopt
from fxopt.runtime import dispatcher_of


class Model(nn.Module):
    """Two tables, a normalization with buffers, and a layer that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.sometimes = nn.Linear(8, 1)

    def forward(self, ids: Tensor, other: bool = False) -> Tensor:
        x = torch.cat([table(ids[:, i : i + 2]) for i, table in enumerate(self.tables)], 1)
        return self.sometimes(x) if other else self.layers(x)


def train(model: nn.Module, steps: list[tuple[Tensor, bool, bool]], optimizer: torch.optim.Optimizer) -> None:
    for ids, other, synced in steps:
        with contextlib.nullcontext() if synced else model.no_sync():
            model(ids, other=other).square().sum().backward()
        if synced:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()


def compare(what: str, device: torch.device, options: dict[str, Any], plan: list[tuple[bool, bool]]) -> None:
    torch.manual_seed(0)
    eager = Model().to(device)
    inner = copy.deepcopy(eager)
    models: list[nn.Module] = []
    for module in (eager, inner):
        if not options.get("find_unused_parameters"):
            module.sometimes.requires_grad_(False)
        models.append(DistributedDataParallel(module, **options))
    optimized = fxopt.optimize(models[1])
    assert (
        isinstance(optimized, DistributedDataParallel)
        and optimized.state_dict().keys() == models[0].state_dict().keys()
    )
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has batches, and sizes, of its own
    sizes = [5 + dist.get_rank() + i for i in range(len(plan))]
    batches = [torch.randint(0, 20, (size, 3), generator=generator).to(device) for size in sizes]
    steps = [(ids, *step) for ids, step in zip(batches, plan, strict=True)]
    for model in (models[0], optimized):
        train(model, steps, torch.optim.Adagrad(model.parameters(), lr=0.1))
    for (name, a), b in zip(inner.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{what}: {name}: {text}")
    same = torch.cat([p.detach().view(-1) for p in inner.parameters()])
    theirs = [torch.empty_like(same) for _ in range(2)]
    dist.all_gather(theirs, same)
    assert torch.equal(*theirs), f"{what}: the ranks differ"
    assert not [f.eager_reason for f in dispatcher_of(optimized.module).findings if f.eager_reason], what


def main(backend: str) -> None:
    dist.init_process_group(backend)
    device = torch.device("cuda", dist.get_rank()) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    compare("accumulation", device, {}, [(False, False), (False, True), (False, False), (False, True)])
    unused = [(False, True), (True, True), (True, True), (False, True)]
    compare("unused parameters", device, {"find_unused_parameters": True}, unused)
    compare("static graph", device, {"static_graph": True, "gradient_as_bucket_view": True}, [(False, True)] * 3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
