"""Ids of a table's lookups with a chosen hotness: how often the same rows come back."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

HOTNESS = {"high hot": 0.0405, "medium hot": 0.2050, "low hot": 0.4621}
IDS = ("uniform", "zipf", "one item", *HOTNESS)


def make_ids(kind: str, n: int, rows: int, generator: torch.Generator) -> Tensor:
    """n ids in [0, rows), int64 [n], on the generator's device; hot rows lie anywhere in the table.

    kind: "uniform"; "zipf", of exponent 1; "one item": all the same; or a class of HOTNESS, after "Pushing the
    Performance Envelope of DNN-based Recommendation Systems Inference on GPUs" (Jain et al., MICRO 2024). That paper
    sorts production traces by the share of unique ids among as many lookups as the table has rows (uniform ids:
    63.21%, which is 1 - 1/e). Those traces are not used here: ids follow the power law with the same share.

    Raises:
        ValueError: another kind.
    """
    if kind not in IDS:
        raise ValueError(f"kind of ids: expected one of {', '.join(IDS)}, found {kind!r}")
    device = generator.device
    if kind == "one item":
        return torch.randint(rows, (1,), generator=generator, device=device).expand(n).contiguous()
    uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
    if kind == "uniform":
        return (uniform * rows).long().clamp(max=rows - 1)
    exponent = 1.0 if kind == "zipf" else exponent_of(HOTNESS[kind], rows)
    ranks = torch.searchsorted(probabilities(exponent, rows).cumsum(0).to(device), uniform).clamp(max=rows - 1)
    return torch.randperm(rows, generator=generator, device=device)[ranks]


def probabilities(exponent: float, rows: int) -> Tensor:
    """Of each rank of a power law, the most frequent first: fp64 [rows]."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent)
    return weights / weights.sum()


@functools.cache
def exponent_of(share: float, rows: int) -> float:
    """Of the power law whose `rows` draws from `rows` rows are expected to have `share * rows` unique ones."""
    low, high = 0.0, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        unseen = torch.log1p(-probabilities(middle, rows)).mul(rows).exp()
        low, high = (middle, high) if 1 - float(unseen.mean()) > share else (low, middle)
    return (low + high) / 2
