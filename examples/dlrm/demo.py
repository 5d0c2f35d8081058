"""The tour that `make demo` gives: generate rows, train, optimize, report, compare. About two minutes."""

from __future__ import annotations

from pathlib import Path

import torch

import fxopt
from evaluate import show
from generate import generate
from model import DLRM, TABLE_ROWS
from train import console, train

ROWS = 400_000
TRAINING_SECONDS = 60.0


def main() -> None:
    path = Path(__file__).parent / "data" / f"generated_{ROWS}.tsv"
    if not path.exists():
        console.rule(f"Generating {ROWS} rows in the Criteo format")
        generate(path, ROWS)
    console.rule("Training a DLRM with 26 embedding tables, in eager PyTorch")
    torch.manual_seed(0)
    model = DLRM()
    train(model, path, seconds=TRAINING_SECONDS)

    console.rule("model = fxopt.optimize(model)")
    model.eval()
    optimized = fxopt.optimize(model)
    show({"eager": model, "optimized": optimized}, path, TABLE_ROWS, console)

    console.rule("print(fxopt.report(model))")
    console.print(fxopt.report(optimized))


if __name__ == "__main__":
    main()
