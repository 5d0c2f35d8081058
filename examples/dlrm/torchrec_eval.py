"""Evaluates a checkpoint of torchrec_train.py without sharding, eager and optimized: AUC, milliseconds per batch.

python torchrec_eval.py runs/torchrec data/rows.tsv
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torchmetrics.classification import BinaryAUROC

from timing import interleaved_medians
from torchrec_model import batches, build

BATCH_SIZES = (64, 256, 1024)


def load(path: Path) -> nn.Module:
    """The whole model of a checkpoint, in eval mode: the shards of each table come together again."""
    model = build()
    state: dict[str, Any] = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


@torch.no_grad()
def compared(models: dict[str, nn.Module], data: Path) -> tuple[dict[str, float], float]:
    """The AUC of each model on the held-out rows, and the largest difference between their logits."""
    metrics, difference = {name: BinaryAUROC() for name in models}, 0.0
    for batch in batches(data, max(BATCH_SIZES), "held-out"):
        logits = [model(batch)[1][1] for model in models.values()]
        for metric, values in zip(metrics.values(), logits, strict=True):
            metric.update(values, batch.labels.int())
        difference = max(difference, float((logits[0] - logits[-1]).abs().max()))
    return {name: float(metric.compute()) for name, metric in metrics.items()}, difference


@torch.no_grad()
def time_table(models: dict[str, nn.Module], data: Path) -> Table:
    """Milliseconds per batch, medians of interleaved calls."""
    first, *_, last = models
    table = Table("batch", *models, f"{first} / {last}", title="Milliseconds per batch")
    for size in BATCH_SIZES:
        batch = next(batches(data, size, "all"))
        medians = interleaved_medians({name: partial(model, batch) for name, model in models.items()})
        cells = [f"{1e3 * medians[name]:.3f}" for name in models]
        table.add_row(str(size), *cells, f"{medians[first] / medians[last]:.2f}x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the folder that torchrec_train.py wrote")
    parser.add_argument("data", type=Path, help="Criteo rows, as for torchrec_train.py")
    arguments = parser.parse_args()
    import fxopt

    model = load(arguments.checkpoint)
    models = {"eager": model, "optimized": fxopt.optimize(model)}
    console = Console()
    aucs, difference = compared(models, arguments.data)
    for name, auc in aucs.items():
        console.print(f"{name}: AUC {auc:.6f}")
    console.print(f"largest difference of a logit: {difference:.2g}")
    console.print(time_table(models, arguments.data))


if __name__ == "__main__":
    main()
