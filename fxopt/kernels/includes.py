"""What a library is compiled from: its sources, and the headers that these include."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def with_headers(sources: Iterable[Path], written: Iterable[tuple[Path, str]] = ()) -> dict[Path, str]:
    """The texts of sources, and of all headers that they include in quotation marks, in the order of their paths.

    written: sources that are no files, (the folder from which they name headers, text).
    """
    found = {path: path.read_text("utf-8") for path in sources}
    waiting = [*((path.parent, text) for path, text in found.items()), *written]
    while waiting:
        folder, text = waiting.pop()
        for name in _INCLUDE.findall(text):
            path = Path(os.path.normpath(folder / name))
            if path not in found and path.exists():  # what the CPU shim includes lies elsewhere
                found[path] = path.read_text("utf-8")
                waiting.append((path.parent, found[path]))
    return dict(sorted(found.items()))
