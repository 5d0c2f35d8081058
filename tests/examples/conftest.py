"""The example's scripts import each other by their bare names, as they do when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / name) for name in ("dlrm", "serve")]
