"""The tour that `make demo` gives: generate rows, train, optimize, report, compare. About two minutes."""

from __future__ import annotations

from pathlib import Path

import torch

import fxopt
from evaluate import show
from generate import generate
from model import DLRM, TABLE_ROWS
from train import HERE, console, train

ROWS = 600_000
TRAINING_SECONDS = 60.0


def main(directory: Path = HERE / "data", rows: int = ROWS, seconds: float = TRAINING_SECONDS) -> None:
    path = directory / f"generated_{rows}.tsv"
    if not path.exists():
        console.rule(f"Generating {rows} rows in the Criteo format")
        generate(path, rows)
    console.rule("Training a DLRM with 26 embedding tables, in eager PyTorch")
    torch.manual_seed(0)
    model = DLRM()
    train(model, path, seconds=seconds)

    console.rule("optimized = fxopt.optimize(model)")
    optimized = fxopt.optimize(model.eval())
    show({"eager": model, "optimized": optimized}, path, TABLE_ROWS, console)

    console.rule("print(fxopt.report(optimized))")
    console.print(fxopt.report(optimized))


if __name__ == "__main__":
    main()
