"""What one of two ranks does: a sharded DLRM trained with and without fxopt, in all ways. Writes what it saw as JSON.

Each of the four tables is sharded in another way, so one plan has all of them. Batches are uneven: the ranks' sizes
differ, in step 3 one rank has no ids, in step 5 one rank has asked for the offsets of its batch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxopt
from fxopt.runtime import dispatcher_of

STEPS = 50
WAYS = {"t0": "table_wise", "t1": "column_wise", "t2": "row_wise", "t3": "data_parallel"}
LOOPS = ("own", "pipeline")
MODES = ("eager", "before", "after")
_CONFIG = fxopt.Config(tune="off")
_ROWS, _DIM = 40, 16


class Dlrm(nn.Module):
    """Bags of three tables and rows of a fourth, both on their way while the dense layers run."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        super().__init__()
        form: Any = {"embedding_dim": _DIM, "num_embeddings": _ROWS}
        bags = [EmbeddingBagConfig(name=t, feature_names=[f"f{t}"], **form) for t in WAYS if t != "t2"]
        self.bags = EmbeddingBagCollection(tables=bags)
        self.rows = EmbeddingCollection(tables=[EmbeddingConfig(name="t2", feature_names=["ft2"], **form)])
        self.dense = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, _DIM), nn.ReLU())
        self.over = nn.Sequential(nn.Linear(5 * _DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Any) -> Any:
        bags, rows = self.bags(batch.sparse_features), self.rows(batch.sparse_features)
        dense = self.dense(batch.dense_features)
        pooled = bags.values() * 2
        row = rows["ft2"].to_padded_dense(3).sum(1)
        logits = self.over(torch.cat([dense, pooled, row], 1)).squeeze(-1)
        loss = self.loss(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach())


def sharded(inner: nn.Module) -> Any:
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={t: ParameterConstraints(sharding_types=[way], min_partition=8) for t, way in WAYS.items()},
    )
    fused: Any = {"optimizer": _sgd(), "learning_rate": 0.1}
    sharders: Any = [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
    plan = planner.collective_plan(inner, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(inner, device=torch.device("cpu"), plan=plan, sharders=sharders)


def _sgd() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_SGD


def batch(step: int) -> Any:
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = 1 + (step + 2 * rank) % 5
    most = 0 if step == 3 and rank == 1 else 3
    lengths = torch.randint(0, most + 1, (len(WAYS) * size,), generator=generator)
    ids = torch.randint(0, _ROWS, (int(lengths.sum()),), generator=generator)
    sparse = KeyedJaggedTensor([f"f{table}" for table in WAYS], ids, lengths=lengths)
    if step == 5 and rank == 0:
        sparse.offsets()
    labels = torch.randint(0, 2, (size,), generator=generator)
    return Batch(torch.randn(size, 3, generator=generator), sparse, labels)


def trained(loop: str, mode: str) -> dict[str, Any]:
    """The losses of one run, and what can be said of the model afterwards."""
    torch.manual_seed(0)
    inner: nn.Module = Dlrm()
    if mode == "before":
        inner = fxopt.optimize(inner, config=_CONFIG)
    whole = sharded(inner)
    plan = str(whole.plan)
    if mode == "after":
        whole = fxopt.optimize(whole, config=_CONFIG)
    optimizer = _optimizer(whole)
    messages = _Messages()
    step = _pipelined(whole, optimizer) if loop == "pipeline" else _stepped(whole, optimizer)
    calls, losses, dists = _counted(whole), list[float](), list[int]()
    for loss in step:
        losses.append(loss)
        dists.append(len(calls))
    dense_sum = sum(float(p.detach().double().sum()) for p in optimizer.param_groups[0]["params"])
    found = dispatcher_of(whole.module).findings if mode != "eager" else []
    return {
        "losses": losses,
        "dists": dists,
        "plan": plan,
        "keys": sorted(whole.state_dict()),
        "dense": dense_sum,
        "messages": messages.end(),
        "captures": [f"{f.signature} {f.operators_before}" for f in found if f.operators_before],
        "eager": [f.eager_reason for f in found if f.eager_reason],
        "boundaries": [leaf.reason for f in found for leaf in f.leaves],
    }


def _stepped(whole: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS) -> Iterator[float]:
    for number in range(first, last):
        optimizer.zero_grad()
        loss, _ = whole(batch(number))
        loss.backward()
        optimizer.step()
        yield loss.item()


def _optimizer(whole: nn.Module) -> torch.optim.Optimizer:
    """Of what the collections do not train by themselves."""
    rest = dict(whole.named_parameters()).items()
    return torch.optim.SGD([p for name, p in rest if not re.search(r"\b(t0|t1|t2)\b", name)], lr=0.1)


def _pipelined(whole: Any, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    pipeline = TrainPipelineSparseDist(whole, optimizer, torch.device("cpu"))
    batches = iter([batch(number) for number in range(STEPS)])
    for _ in range(STEPS):
        yield pipeline.progress(batches)[0].item()


def _counted(whole: nn.Module) -> list[int]:
    """Grows with each input_dist of the two collections."""
    calls: list[int] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def input_dist(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        return input_dist

    for module in whole.modules():
        if hasattr(module, "input_dist"):
            object.__setattr__(module, "input_dist", counting(module.input_dist))
    return calls


class _Messages(logging.Handler):
    """What the pipelines' logger says of modules that are not pipelined."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] = []
        logging.getLogger("torchrec").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "not" in record.getMessage() and "pipelin" in record.getMessage():
            self._said.append(record.getMessage())

    def end(self) -> list[str]:
        logging.getLogger("torchrec").removeHandler(self)
        return self._said


def resumed(folder: str, modes: tuple[str, str]) -> list[float]:
    """The losses of a run in one mode whose second half is run in the other, from a checkpoint."""
    losses: list[float] = []
    path = Path(folder, "-".join(modes))
    for half, mode in enumerate(modes):
        torch.manual_seed(half)
        inner: nn.Module = Dlrm()
        whole = sharded(fxopt.optimize(inner, config=_CONFIG) if mode == "fast" else inner)
        if half:
            state = {"model": whole.state_dict()}
            dcp.load(state, checkpoint_id=path)
            whole.load_state_dict(state["model"])
        losses += _stepped(whole, _optimizer(whole), half * STEPS // 2, (half + 1) * STEPS // 2)
        if not half:
            dcp.save({"model": whole.state_dict()}, checkpoint_id=path)
    return losses


def lost() -> str:
    """What rank 0 is told when rank 1 is gone in the middle of its training."""
    whole = sharded(fxopt.optimize(Dlrm(), config=_CONFIG))
    try:
        for number, _ in enumerate(_stepped(whole, _optimizer(whole))):
            if number == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        return str(error)
    return ""


class Mean(nn.Module):
    """Communicates by hand, through the default group."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        total = x.detach().sum(0)
        dist.all_reduce(total)
        return x - total


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.mean, self.above = nn.Linear(4, 4), Mean(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.mean(self.below(x).relu() * 2)).sum(1)


def by_hand() -> dict[str, Any]:
    torch.manual_seed(0)
    eager = ByHand()
    fast = fxopt.optimize(eager, (torch.randn(3, 4),), _CONFIG)
    calls, same = [], []
    for size in (3, 1, 7):
        x = torch.randn(size, 4)
        expected = eager(x)
        Mean.calls = 0
        same.append(torch.allclose(fast(x), expected, atol=1e-6))
        calls.append(Mean.calls)
    return {"calls": calls, "same": same, "captures": sum(f.operators_before > 0 for f in dispatcher_of(fast).findings)}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"by_hand": by_hand()}
    for loop in LOOPS:
        for mode in MODES:
            found[f"{loop} {mode}"] = trained(loop, mode)
    found["eager-fast"] = resumed(folder, ("eager", "fast"))
    found["fast-eager"] = resumed(folder, ("fast", "eager"))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    raise SystemExit(lost())


if __name__ == "__main__":
    main(sys.argv[1])
