"""What replaces what was found. PASSES is the whole list, in order; each value says why it stands where it does."""

from __future__ import annotations

from collections.abc import Iterator

from fxopt.config import Config
from fxopt.rewrites import (
    attention,
    batched_linears,
    branches,
    cats,
    compressed_interaction,
    compression,
    contractions,
    convolutions,
    cross_layers,
    dead_checks,
    dot_interaction,
    dot_rows,
    embedding_columns,
    field_index,
    grouped_linears,
    grouped_pointwise,
    identities,
    jagged_checks,
    k_largest,
    linear_chains,
    linear_layers,
    linear_pairs,
    lookup_products,
    masked_fields,
    mixtures,
    ones,
    pair_attention,
    pair_products,
    pair_sum,
    pointwise,
    recurrences,
    repeated,
    row_chunks,
    sized_constants,
    sizes,
    table_batched,
    target_attention,
    towers,
    views,
)
from fxopt.rewrites.framework import Rewrite

PASSES: tuple[Rewrite, ...] = (
    # What is dead, or only moves memory.
    masked_fields.REWRITE,
    dead_checks.REWRITE,
    views.REWRITE,
    cats.REWRITE,
    identities.REWRITE,
    sizes.REWRITE,
    # Interactions, attention and layers in disguise, as the model wrote them.
    pair_attention.REWRITE,
    pair_sum.REWRITE,
    dot_interaction.REWRITE,
    contractions.LINEARS,
    target_attention.REWRITE,
    attention.REWRITE,
    linear_layers.TURNED,
    ones.REWRITE,
    compressed_interaction.REWRITE,
    contractions.CONTRACTIONS,
    convolutions.REWRITE,
    k_largest.REWRITE,
    recurrences.REWRITE,
    # Many of a kind at once.
    compression.LINEARS,
    towers.REWRITE,
    repeated.REWRITE,
    repeated.LOOKUPS_ON_CUDA,
    # Lookups, and what is left of their surroundings.
    embedding_columns.REWRITE,
    table_batched.REWRITE,
    jagged_checks.REWRITE,
    compression.TABLES,
    dot_interaction.PARTS,
    views.OF_COLUMNS,
    lookup_products.REWRITE,
    sized_constants.REWRITE,
    field_index.REWRITE,
    pair_products.OF_LOOKUPS,
    pair_products.REWRITE,
    mixtures.REWRITE,
    # The dense layers, and what stands between them.
    pointwise.CROSSES,
    linear_pairs.REWRITE,
    linear_chains.REWRITE,
    # Those of one device, what nobody took, and large batches.
    dot_rows.REWRITE,
    dot_rows.OF_FLOATS,
    linear_layers.REWRITE,
    dot_rows.GATHERED,
    cross_layers.REWRITE,
    batched_linears.WIDE,
    linear_chains.OF_NARROW_LAYERS,
    linear_chains.FOR_FEW_ROWS,
    batched_linears.REWRITE,
    grouped_linears.REWRITE,
    linear_layers.OF_PIECES,
    pointwise.REWRITE,
    grouped_pointwise.REWRITE,
    row_chunks.REWRITE,
    branches.REWRITE,
)


def passes(config: Config) -> Iterator[Rewrite]:
    """The passes that a configuration asks for."""
    return (each for each in PASSES if each.when(config) and not set(each.names) & set(config.disable))
