"""Trains the DLRM on Criteo data, or on generated rows, and reports log loss and AUC on the held-out part.

python train.py                                     # generated rows
python train.py day_0.gz --epochs 1 --optimize      # published data, training the optimized model
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import nn

import checkpoint
from criteo import Batch, CriteoError, read_batches
from evaluate import predict
from generate import generate
from metrics import auc, log_loss
from model import DLRM, TABLE_ROWS

HERE = Path(__file__).parent
GENERATED_ROWS = 200_000
console = Console()


def train(
    model: nn.Module,
    path: Path,
    *,
    epochs: int = 1,
    batch_size: int = 1024,
    learning_rate: float = 0.02,
    seconds: float = float("inf"),
) -> int:
    """Adagrad on the file's training part, for `epochs` passes or `seconds`; returns the number of rows seen."""
    # Fused: the dense gradients of the tables make the optimizer the larger half of a step otherwise.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=learning_rate, fused=True)
    end = monotonic() + seconds
    rows, loss = 0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    model.train()
    with Progress(*columns, console=console) as progress:
        for epoch in range(1, epochs + 1):
            task = progress.add_task(f"epoch {epoch}/{epochs}", total=1.0, state="")
            for batch in read_batches(path, batch_size, TABLE_ROWS, "train", partial(_advance, progress, task)):
                step_loss = step(model, optimizer, batch)
                loss = step_loss if rows == 0 else 0.95 * loss + 0.05 * step_loss
                rows += len(batch.labels)
                progress.update(task, state=f"{rows} rows, loss {loss:.4f}")
                if monotonic() > end:
                    return rows
    return rows


def _advance(progress: Progress, task: TaskID, fraction: float) -> None:
    progress.update(task, completed=fraction)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One optimizer step; returns the batch's loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="Criteo rows, tab or comma separated, plain or gzip")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--optimize", action="store_true", help="train the model that fxopt.optimize returns")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "runs" / "dlrm.pt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    path = arguments.data or HERE / "data" / f"generated_{GENERATED_ROWS}.tsv"
    if arguments.data is None and not path.exists():
        console.print(f"no data file given: generating {GENERATED_ROWS} rows")
        generate(path, GENERATED_ROWS)
    torch.manual_seed(arguments.seed)
    model: nn.Module = DLRM()
    if arguments.optimize:
        import fxopt

        model = fxopt.optimize(model)
    try:
        rows = train(
            model, path, epochs=arguments.epochs, batch_size=arguments.batch_size, learning_rate=arguments.learning_rate
        )
        labels, logits = predict(model, path, TABLE_ROWS)
    except (CriteoError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    checkpoint.save(arguments.checkpoint, model, TABLE_ROWS)
    console.print(f"{rows} rows; held out: log loss {log_loss(labels, logits):.4f}, AUC {auc(labels, logits):.4f}")
    console.print(f"checkpoint: {arguments.checkpoint}")


if __name__ == "__main__":
    main()
