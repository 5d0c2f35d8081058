"""Where compiled kernels are kept, and whose are loaded: they are code that runs with the user's rights.

A wheel may bring kernels within the package; they come before those of the cache.

A library is built in a private folder under a flock and renamed into place, so a process killed at any moment leaves
nothing half done: the kernel drops its lock, and the next builder clears its folder away. (The scheme of DeepGEMM's JIT
cache.) Everybody may read it, and its owner alone may write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

PREBUILT = Path(__file__).parent / "prebuilt"  # exists in wheels that were made with kernels
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(RuntimeError):
    """A library that could not be had; the message says what is missing or what the compiler said."""


def cache_dir() -> Path:
    """Where libraries are kept: FXOPT_CACHE, else TORCH_EXTENSIONS_DIR/fxopt, else XDG_CACHE_HOME/fxopt."""
    if chosen := os.environ.get("FXOPT_CACHE"):
        return Path(chosen)
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fxopt"


def cached(folder: str, compiler: str | None, file: str) -> Path | None:
    """This file in `folder` of the package, else in that of the cache which this compiler has made.

    Args:
        folder: named by what it holds and its key, which says all but the compiler.
        compiler: None: of any one, on a machine without.

    Raises:
        BuildError: there is one, and somebody else has made it, or may write it.
    """
    brought, found = PREBUILT / folder / file, sorted(cache_dir().glob(f"{folder}-{compiler or '*'}/{file}"))
    if brought.exists() and not (compiler and _distrust_either(brought)):  # which a compiler makes again
        found.insert(0, brought)
    reasons = list(map(_distrust_either, found))
    if found and all(reasons):
        raise BuildError(f"refused {found[0]}, because it is code: {reasons[0]} (FXOPT_CACHE chooses another cache)")
    return next((path for path, reason in zip(found, reasons, strict=True) if not reason), None)


def _distrust_either(path: Path) -> str:
    return _distrust(path) or _distrust(path.parent)


def _distrust(path: Path) -> str:
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}, who is neither this one ({os.geteuid()}) nor root"
    if status.st_mode & _OTHERS_WRITE:
        return f"others than its owner may write {path} (mode {stat.S_IMODE(status.st_mode):o}; try chmod go-w)"
    return ""


def built(file: str, folder: str, lock: str, make: Callable[[Path], None]) -> Path:
    """A file in a folder of the cache; `make` compiles it there while nobody else does.

    Raises:
        BuildError: there is no place to write, or `make` raises it.
    """
    target = cache_dir() / folder
    try:
        with locked(lock) as private:
            if not target.exists():
                make(private)
                for path in private.iterdir():
                    path.chmod(path.stat().st_mode & ~_OTHERS_WRITE)
                os.rename(private, target)
    except OSError as error:
        message = f"cannot write the kernel cache {cache_dir()} (FXOPT_CACHE chooses another): {error}"
        raise BuildError(message) from error
    return target / file


@contextlib.contextmanager
def locked(name: str) -> Iterator[Path]:
    """Holds a lock, and gives a folder that others may read."""
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = root / f".building-{name}"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed builder: it held the lock
        folder.mkdir(mode=0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
