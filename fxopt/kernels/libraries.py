"""Every library of C++ for the CPU, for those who compile ahead; what takes longest first."""

from __future__ import annotations

from . import entry
from .attention import op as attention
from .columns import op as columns
from .compressed_interaction import op as compressed_interaction
from .interactions import library as interactions
from .k_largest import op as k_largest
from .lookup_products import op as lookup_products
from .mlp import op as mlp
from .pointwise import op as pointwise
from .row_update import op as row_update
from .target_attention import op as target_attention
from .towers import op as towers

LIBRARIES = (
    columns.KERNEL,
    towers.KERNEL,
    mlp.KERNEL,
    target_attention.KERNEL,
    entry.ENTRY,
    columns.ENTRY,
    interactions.KERNEL,
    pointwise.KERNEL,
    attention.KERNEL,
    lookup_products.KERNEL,
    compressed_interaction.KERNEL,
    k_largest.KERNEL,
    row_update.KERNEL,
)
