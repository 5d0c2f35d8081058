"""What replaces what was found. PASSES is the whole list, in order; each value says why it stands where it does."""

from __future__ import annotations

from fxopt.rewrites import embedding_columns, field_index, linear
from fxopt.rewrites.core import Rewrite

PASSES: tuple[Rewrite, ...] = (
    embedding_columns.REWRITE,
    field_index.REWRITE,
    linear.REWRITE,
)
