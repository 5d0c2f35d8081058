"""Evaluates a checkpoint, eager and optimized: AUC and log loss of both, time per batch before and after.

python evaluate.py runs/dlrm.pt data/generated_200000.tsv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import checkpoint
from criteo import HELD_OUT_EVERY, Batch, CriteoError, read_batches
from metrics import auc, log_loss
from timing import interleaved_medians

HERE = Path(__file__).parent
BATCH_SIZES = (1, 64, 256, 1024)


@torch.no_grad()
def predict(model: nn.Module, path: Path, table_rows: Sequence[int], batch_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Labels and logits, [N] each, of the held-out rows, in eval mode."""
    model.eval()
    labels, logits = [], []
    for batch in read_batches(path, batch_size, table_rows, part="held-out"):
        labels.append(batch.labels)
        logits.append(model(batch.dense, batch.sparse))
    if not labels:
        raise CriteoError(f"{path}: too few rows: every {HELD_OUT_EVERY}th is held out")
    return torch.cat(labels), torch.cat(logits)


def accuracy_table(models: dict[str, nn.Module], path: Path, table_rows: Sequence[int]) -> Table:
    """Log loss and AUC of each model on the held-out part."""
    table = Table("held-out rows", "log loss", "AUC", title="Accuracy")
    for name, model in models.items():
        labels, logits = predict(model, path, table_rows)
        table.add_row(name, f"{log_loss(labels, logits):.6f}", f"{auc(labels, logits):.6f}")
    return table


@torch.no_grad()
def time_table(models: dict[str, nn.Module], batch: Batch, batch_sizes: Sequence[int] = BATCH_SIZES) -> Table:
    """Milliseconds per batch, medians of interleaved calls; `batch` needs as many rows as the largest size."""
    first, *_, last = models
    table = Table("batch", *models, f"{first} / {last}", title="Milliseconds per batch")
    for size in batch_sizes:
        inputs = batch.dense[:size].clone(), batch.sparse[:size].clone()
        calls = {name: partial(model, *inputs) for name, model in models.items()}
        medians = interleaved_medians(calls)
        cells = [f"{1e3 * medians[name]:.3f}" for name in models]
        table.add_row(str(size), *cells, f"{medians[first] / medians[last]:.2f}x")
    return table


def show(models: dict[str, nn.Module], path: Path, table_rows: Sequence[int], console: Console) -> None:
    """Print both tables; leaves the models in eval mode."""
    console.print(accuracy_table(models, path, table_rows))
    rows = next(read_batches(path, max(BATCH_SIZES), table_rows))
    console.print(time_table(models, rows, [size for size in BATCH_SIZES if size <= len(rows.labels)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=HERE / "runs" / "dlrm.pt")
    parser.add_argument("data", type=Path, nargs="?", default=HERE / "data" / "generated_200000.tsv")
    arguments = parser.parse_args()
    try:
        model, table_rows = checkpoint.load(arguments.checkpoint)
        import fxopt

        show({"eager": model, "optimized": fxopt.optimize(model)}, arguments.data, table_rows, Console())
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
