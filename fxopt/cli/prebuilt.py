"""The CPU kernels within a package, for wheels (setup.py) that need no compiler where they are installed."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fxopt
from fxopt.kernels.build import build
from fxopt.kernels.cache import PREBUILT
from fxopt.kernels.libraries import LIBRARIES
from fxopt.runtime.native import LIBRARY

SERVING = (*LIBRARIES, LIBRARY)
_INSIDE = PREBUILT.relative_to(Path(fxopt.__file__).parent)


def write(package: Path) -> None:
    """Builds the kernels, or takes them from the cache, and puts them into a copy of the package `fxopt`.

    Raises:
        BuildError: one cannot be compiled.
    """
    shutil.rmtree(package / _INSIDE, ignore_errors=True)  # of an earlier wheel, from other sources
    with ThreadPoolExecutor() as pool:
        for library, path in zip(SERVING, pool.map(build, SERVING), strict=True):
            target = package / _INSIDE / library.folder / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
