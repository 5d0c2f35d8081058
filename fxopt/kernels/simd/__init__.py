"""Headers that the CPU kernels share: vectors of floats, their elementary functions, the choice of instruction set."""

from __future__ import annotations

import platform

# A product and a sum round one by one as torch's do; an FMA is only where the source says so.
CFLAGS = ("-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
INSTRUCTION_SETS = ("avx512", "avx2", "scalar") if platform.machine() in ("x86_64", "AMD64") else ("scalar",)
_SOURCE = """#include "simd/std.h"
#include "{shared}"
#include "simd/{name}.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "{kernels}"
"""


def sources(shared: str, kernels: str) -> tuple[tuple[str, str], ...]:
    """The header `kernels` as a source for each instruction set, for :class:`..build.Library`: (file name, text).

    shared: the header with what all instruction sets, and cpu.cpp, see alike. Both are named as from `kernels/`.
    """
    return tuple(
        (f"isa_{name}.cpp", _SOURCE.format(shared=shared, name=name, kernels=kernels)) for name in INSTRUCTION_SETS
    )
