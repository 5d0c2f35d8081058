"""Self- and cross-attention: softmax(q k^T) v with any number of heads, as libraries and people write it."""

from __future__ import annotations

from fxopt.patterns.attention.search import Found, find_attention

__all__ = ["Found", "find_attention"]
