"""Submodules that stay opaque."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fxopt.findings import Place


@dataclass(frozen=True)
class Leaf:
    """A submodule that runs as it is: its path, why, and the line that stopped the capture."""

    path: str
    reason: str
    place: Place


class LeafCall(nn.Module):
    """Not yet."""
