"""Which mixtures of experts the CUDA kernel serves in one launch."""

from __future__ import annotations

MOST_MIXTURES, MOST_EXPERTS = 16, 32  # of a launch
MOST_WEIGHTS = 16  # of a mixture


def mixes(mixtures: int, experts: int) -> bool:
    """Whether one launch takes so many mixtures, of so many different experts in all."""
    return 0 < mixtures <= MOST_MIXTURES and 0 < experts <= MOST_EXPERTS
