"""Timings that were taken before, on this machine, by this version: a small JSON file beside the compiled kernels."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from fxopt.kernels.cache import cache_dir
from fxopt.machine import processor

Ratios = dict[int, float]  # rows -> seconds before / seconds after
_PACKAGE = Path(__file__).resolve().parents[1]


class Memory:
    """Ratios by key. Reading never fails: a file that is missing, cut off or foreign is an empty one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir() / f"timings-{_machine()}.json"
        self._known: dict[str, Ratios] = _read(self.path)
        self._fresh: dict[str, Ratios] = {}

    def get(self, key: str) -> Ratios | None:
        return self._known.get(key)

    def put(self, key: str, ratios: Ratios) -> None:
        self._known[key] = self._fresh[key] = ratios

    def save(self) -> None:
        """Add what is new to the file, by a rename; a machine that cannot write measures again next time."""
        fresh, self._fresh = self._fresh, {}  # another thread's puts go on
        if not fresh:
            return
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=_made(self.path.parent)) as folder:
            file = Path(folder, self.path.name)
            file.write_text(json.dumps(_read(self.path) | fresh, indent=0))
            os.replace(file, self.path)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(path: Path) -> dict[str, Ratios]:
    try:
        entries = json.loads(path.read_text())
        return {key: {int(rows): float(ratio) for rows, ratio in value.items()} for key, value in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@functools.cache
def _machine() -> str:
    """What a timing depends on besides its own key: the processor, torch, and every source of this package."""
    digest = hashlib.sha256(f"{processor()} {os.cpu_count()} {torch.__version__}".encode())
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
