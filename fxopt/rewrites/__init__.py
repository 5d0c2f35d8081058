"""What replaces what was found. PASSES is the whole list, in order; each value says why it stands where it does."""

from __future__ import annotations

from fxopt.rewrites import (
    cats,
    compressed_interaction,
    contractions,
    dead_checks,
    dot_interaction,
    embedding_columns,
    field_index,
    gpu_linears,
    identities,
    k_largest,
    linear_chains,
    pointwise,
    pair_sum,
    repeated,
    row_chunks,
    sized_constants,
    sizes,
    target_attention,
    towers,
    views,
)
from fxopt.rewrites.core import Rewrite

PASSES: tuple[Rewrite, ...] = (
    dead_checks.REWRITE,
    views.REWRITE,
    cats.REWRITE,
    identities.REWRITE,
    sizes.REWRITE,
    pair_sum.REWRITE,
    dot_interaction.REWRITE,
    contractions.LINEARS,
    target_attention.REWRITE,
    compressed_interaction.REWRITE,
    contractions.CONTRACTIONS,
    k_largest.REWRITE,
    repeated.REWRITE,
    embedding_columns.REWRITE,
    views.OF_COLUMNS,
    sized_constants.REWRITE,
    field_index.REWRITE,
    towers.REWRITE,
    pointwise.CROSSES,
    linear_chains.REWRITE,
    pointwise.REWRITE,
    row_chunks.REWRITE,
    gpu_linears.REWRITE,
)
