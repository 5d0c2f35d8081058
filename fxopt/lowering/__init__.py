"""What runs a rewritten graph: torch's operators one by one, or islands of them compiled by Inductor."""

from __future__ import annotations

from fxopt.lowering.compiled import NotLowered, lower

__all__ = ["NotLowered", "lower"]
