"""The library that the interaction kernels share."""

from __future__ import annotations

from pathlib import Path

from ..operators import cpu_library

KERNEL = cpu_library(Path(__file__).parent, "layout.h", "kernels.h")
