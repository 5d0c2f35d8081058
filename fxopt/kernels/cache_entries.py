"""What lies in the kernel cache: compiled libraries, and the timings beside them."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_dir

_OURS = re.compile(r"fxopt_\w+(-sm_\w+)?-[0-9a-f]{16}-\w+|timings-[0-9a-f]{16}\.json")  # locks stay: somebody may wait


@dataclass(frozen=True)
class Entry:
    """A library's folder or a file of timings. age: seconds since it was written."""

    path: Path
    bytes: int
    age: float


def entries() -> list[Entry]:
    """All that fxopt has put there and may be compiled or timed again, the oldest first."""
    folder = cache_dir()
    found = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)] if folder.is_dir() else []
    now = time.time()
    return sorted((Entry(path, _bytes(path), now - path.stat().st_mtime) for path in found), key=lambda each: -each.age)


def clean() -> int:
    """Removes these entries; the bytes that this freed. A process that has loaded a library keeps it.

    Raises:
        OSError: one cannot be removed.
    """
    freed = 0
    for each in entries():
        if each.path.is_dir():
            shutil.rmtree(each.path)
        else:
            each.path.unlink(missing_ok=True)
        freed += each.bytes
    return freed


def writable() -> bool:
    """Whether a library could be put there."""
    folder = next((each for each in (cache_dir(), *cache_dir().parents) if each.exists()), Path("/"))
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)
