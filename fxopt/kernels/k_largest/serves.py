"""Which lists the kernels serve."""

from __future__ import annotations

MOST = 64  # k
LONGEST_ON_CUDA = 256  # numbers of a list: each is compared with all others
