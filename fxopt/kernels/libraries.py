"""Every library of kernels, for those who compile ahead; what takes longest first."""

from __future__ import annotations

from . import entry
from .attention import op as attention
from .columns import cuda as columns_cuda
from .columns import op as columns
from .compressed_interaction import op as compressed_interaction
from .interactions import library as interactions
from .interactions.cuda import dot_rows, gathered
from .k_largest import op as k_largest
from .lookup_products import op as lookup_products
from .mlp import op as mlp
from .mlp.cuda import chains, cross, few_rows, linear
from .pointwise import op as pointwise
from .row_update import op as row_update
from .stage import op as stage
from .target_attention import cuda as cuda_attention
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
BESIDE_CUDA = (columns_cuda.WRAPPER, stage.POINTERS)  # C++ between torch and the kernels for GPUs
CUDA_LIBRARIES = (
    columns_cuda.KERNEL,
    linear.KERNEL,
    gathered.KERNEL,
    dot_rows.KERNEL,
    few_rows.KERNEL,
    cuda_attention.KERNEL,
    chains.KERNEL,
    stage.KERNEL,
    cross.KERNEL,
    row_update.CUDA,
)
