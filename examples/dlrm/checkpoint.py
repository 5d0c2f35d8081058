"""A trained DLRM on disk: its sizes and its state_dict, loadable without running pickled code."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from model import DLRM


def save(path: str | Path, model: nn.Module, table_rows: tuple[int, ...]) -> None:
    """Write the model (eager or optimized: the keys are the same); `path` appears only when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save({"table_rows": table_rows, "model": model.state_dict()}, partial)
    partial.replace(path)


def load(path: str | Path) -> tuple[DLRM, tuple[int, ...]]:
    """The model of a checkpoint, in eval mode, and the rows of its tables."""
    content = torch.load(path, weights_only=True)
    if not isinstance(content, dict) or content.keys() != {"table_rows", "model"}:
        raise ValueError(f"{path}: expected a checkpoint of train.py")
    table_rows = tuple(content["table_rows"])
    model = DLRM(table_rows)
    model.load_state_dict(content["model"])
    return model.eval(), table_rows
