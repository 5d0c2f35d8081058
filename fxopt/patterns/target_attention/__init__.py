"""Target attention: a query scored against every position of a sequence by an MLP, as DIN and its kin write it."""

from __future__ import annotations

from fxopt.patterns.target_attention.search import Found, Source, find_target_attention

__all__ = ["Found", "Source", "find_target_attention"]
