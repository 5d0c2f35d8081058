"""Log loss and the area under the ROC curve, on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def auc(labels: Tensor, scores: Tensor) -> float:
    """Probability that a positive scores above a negative, a tie counting one half (Mann-Whitney U).

    Args:
        labels: [N], 0 or 1, any dtype.
        scores: [N], any float dtype; only their order matters.

    Returns nan when one of the classes is absent; raises ValueError for NaN scores, which have no order.
    """
    if labels.shape != scores.shape or labels.dim() != 1:
        raise ValueError(f"auc: expected labels and scores [N], found {list(labels.shape)} and {list(scores.shape)}")
    if scores.isnan().any():
        raise ValueError("auc: the scores contain NaN")
    positive = labels > 0.5
    positives = int(positive.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, group, size = torch.unique(scores, return_inverse=True, return_counts=True)  # groups of ties, ascending
    last_rank = size.cumsum(0).double()
    rank = last_rank - (size.double() - 1) / 2  # a group's mean rank, from 1
    u = rank[group[positive]].sum().item() - positives * (positives + 1) / 2
    return u / (positives * negatives)


def log_loss(labels: Tensor, logits: Tensor) -> float:
    """Mean binary cross entropy (natural logarithm) of logits [N] against labels [N] of 0 or 1."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    return float(loss)
