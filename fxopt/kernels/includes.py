"""Which headers a source includes: a change to one of them is a change to its library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def included(sources: Iterable[tuple[Path, str]]) -> tuple[Path, ...]:
    """The headers beside sources, (folder, text), that these name in quotation marks, and those that they include."""
    waiting, found = list(sources), set[Path]()
    while waiting:
        folder, text = waiting.pop()
        for name in _INCLUDE.findall(text):
            path = Path(os.path.normpath(folder / name))
            if path not in found and path.exists():  # what the CPU shim includes lies elsewhere
                found.add(path)
                waiting.append((path.parent, path.read_text()))
    return tuple(sorted(found))
