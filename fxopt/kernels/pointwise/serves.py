"""Which calls of a plan one launch on CUDA takes."""

from __future__ import annotations

from .cuda.geometry import most_calls, scheduled


def calls_at_once(plan: str) -> int:
    """How many calls of a plan, at most."""
    return most_calls(plan)


def sizes_matter(plan: str) -> bool:
    """Whether calls that share a launch have the same sizes: lanes share the rows of sums alike."""
    return scheduled(plan).reduces
