"""What replaces what was found. PASSES is the whole list, in order; each value says why it stands where it does."""

from __future__ import annotations

from fxopt.rewrites import (
    cats,
    contractions,
    dead_checks,
    embedding_columns,
    field_index,
    identities,
    linear,
    repeated,
    sized_constants,
    sizes,
    views,
)
from fxopt.rewrites.core import Rewrite

PASSES: tuple[Rewrite, ...] = (
    dead_checks.REWRITE,
    views.REWRITE,
    cats.REWRITE,
    identities.REWRITE,
    sizes.REWRITE,
    contractions.LINEARS,
    contractions.CONTRACTIONS,
    repeated.REWRITE,
    embedding_columns.REWRITE,
    views.OF_COLUMNS,
    sized_constants.REWRITE,
    field_index.REWRITE,
    linear.REWRITE,
)
