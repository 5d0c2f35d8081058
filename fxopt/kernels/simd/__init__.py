"""Headers that the CPU kernels share: vectors of floats, their elementary functions, the choice of instruction set."""

from __future__ import annotations

from pathlib import Path

HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
# A product and a sum round one by one as torch's do; an FMA is only where the source says so.
CFLAGS = ("-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
