"""Trains TorchRec's DLRM with sharded tables: one process for each GPU, or without GPUs a few on the CPU.

torchrun --nproc-per-node 2 torchrec_train.py data/rows.tsv --optimize
torchrun --nproc-per-node 2 torchrec_train.py data/rows.tsv --optimize --resume
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_model import batches, build

HERE = Path(__file__).parent


def build_sharded(learning_rate: float, device: torch.device) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model with its tables where TorchRec's planner puts them. They are updated within backward."""
    model = build(device)
    tables = model.get_submodule("model.sparse_arch").parameters()
    apply_optimizer_in_backward(torch.optim.Adagrad, tables, {"lr": learning_rate})
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=learning_rate))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def save(path: Path, model: nn.Module, optimizer: CombinedOptimizer, step: int) -> None:
    """All ranks write their shards; the keys are those of the model without fxopt."""
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: CombinedOptimizer) -> int:
    """The number of steps that the checkpoint has seen."""
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, arguments: argparse.Namespace, console: Console
) -> int:
    """One pass over the file's training part; returns the number of steps."""
    step = load(arguments.checkpoint, model, optimizer) if arguments.resume else 0
    data = _share_of_this_rank(arguments, "train")
    pipeline = TrainPipelineSparseDist(model, optimizer, model.device)
    rest = islice(data, step, arguments.steps)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=arguments.steps, completed=step, state="")
        while True:
            try:
                loss, *_ = pipeline.progress(rest)
            except StopIteration:
                return step
            step += 1
            progress.update(task, completed=step, state=f"step {step}, loss {loss.item():.4f}")
            if step % arguments.report_every == 0:
                console.print(f"step {step}: loss {loss.item():.6f}")
            if step % arguments.save_every == 0:
                save(arguments.checkpoint, model, optimizer, step)


@torch.no_grad()
def held_out_auc(model: DistributedModelParallel, optimizer: CombinedOptimizer, arguments: argparse.Namespace) -> float:
    """Of the held-out rows of all ranks."""
    model.eval()
    metric = BinaryAUROC().to(model.device)
    pipeline = EvalPipelineSparseDist(model, optimizer, model.device)
    data = _share_of_this_rank(arguments, "held-out")
    while True:
        try:
            _, logits, labels = pipeline.progress(data)
        except StopIteration:
            return float(metric.compute())
        metric.update(logits, labels.int())


def _share_of_this_rank(arguments: argparse.Namespace, part: Any) -> Iterator[Any]:
    return batches(arguments.data, arguments.batch_size, part, dist.get_rank(), dist.get_world_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="Criteo rows, tab or comma separated, plain or gzip")
    parser.add_argument("--optimize", action="store_true", help="train the model that fxopt.optimize returns")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of each rank in a step")
    parser.add_argument("--steps", type=int, help="stop after so many; by default at the end of the file")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "runs" / "torchrec", help="a folder")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--report-every", type=int, default=100, help="steps between printed losses")
    arguments = parser.parse_args()

    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    console = Console(quiet=dist.get_rank() > 0)
    torch.manual_seed(0)
    model, optimizer = build_sharded(arguments.learning_rate, device)
    if arguments.optimize:
        import fxopt

        model = fxopt.optimize(model)
    steps = train(model, optimizer, arguments, console)
    save(arguments.checkpoint, model, optimizer, steps)
    console.print(f"{steps} steps; held out: AUC {held_out_auc(model, optimizer, arguments):.4f}")
    console.print(f"checkpoint: {arguments.checkpoint}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
