"""`python -m fxopt build`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fxopt.cli.bar import bar


def add(commands: Any) -> None:
    build = commands.add_parser("build", help="compile every kernel ahead of serving", description=run.__doc__)
    archs = "architectures of GPUs to compile for, as in sm_80,sm_90a (default: those of the GPUs here)"
    build.add_argument("--arch", type=_names, metavar="NAMES", help=archs)
    folder = (
        "also write the kernels of exported programs to this folder as one library, libfxopt.so, for C++ and fxopt.load"
    )
    build.add_argument("--bundle", type=Path, metavar="DIR", help=folder)
    build.set_defaults(command=run)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def run(options: argparse.Namespace) -> None:
    """Compiles every kernel now, so that no server does it at its first call. FXOPT_CACHE chooses the folder."""
    from fxopt.cli.prebuilt import SERVING
    from fxopt.kernels import cuda_build
    from fxopt.kernels.build import build, find
    from fxopt.kernels.libraries import BESIDE_CUDA, CUDA_LIBRARIES

    archs, why_none = _architectures(options.arch)
    cuda = [
        _Task(f"{each.name} for {arch}", partial(cuda_build.find, each, arch), partial(cuda_build.build, each, arch))
        for arch in archs
        for each in CUDA_LIBRARIES
    ]
    libraries = (*SERVING, *(BESIDE_CUDA if archs else ()))
    _compile([*cuda, *(_Task(each.name, partial(find, each), partial(build, each)) for each in libraries)], why_none)
    if options.bundle is not None:
        _bundle(options.bundle, archs)


def _bundle(folder: Path, archs: Sequence[str]) -> None:
    from fxopt.export import bundle
    from fxopt.kernels.cache import BuildError

    try:
        bundle.write(folder, archs)
    except OSError as error:
        raise BuildError(f"--bundle {folder}: cannot write there: {error.strerror}") from error
    print(f"{folder / bundle.FRONT} opens the kernels beside it ({bundle.MANIFEST} lists them)")


def _architectures(asked: Sequence[str] | None) -> tuple[Sequence[str], str]:
    """What the CUDA kernels are compiled for, and where that is nothing, a line that says why."""
    import torch

    from fxopt.kernels import cuda_build
    from fxopt.report.model_file import UsageError

    if asked is not None:
        known = cuda_build.architectures()
        if wrong := [name for name in asked if name not in known]:
            raise UsageError(f"--arch: expected names with commas between, of {', '.join(known)}; found {wrong[0]!r}")
        return asked, ""
    if cuda_build.nvcc() is None:
        return (), f"CUDA kernels were not built: {cuda_build.NO_COMPILER}"
    here = {cuda_build.arch_on(device) for device in range(torch.cuda.device_count())}
    archs = sorted(filter(cuda_build.serves, here))
    return archs, "" if archs else "CUDA kernels were not built: no GPU for them is here (--arch names others)"


class _Task(NamedTuple):
    """One library to compile."""

    name: str
    find: Callable[[], Path | None]
    build: Callable[[], Path]


def _compile(tasks: Sequence[_Task], remark: str) -> None:
    """All at once, then a line for each. What fails keeps nothing else from being built."""
    from fxopt.kernels.cache import BuildError

    known, start = [task.find() is not None for task in tasks], time.perf_counter()
    with bar(len(tasks)) as step, ThreadPoolExecutor(os.cpu_count()) as pool:
        step("compiling")
        builds = {pool.submit(task.build): task.name for task in tasks}
        for done in as_completed(builds):
            step(f"{builds[done]} is done")
    errors: dict[str, None] = {}
    for (done, name), before in zip(builds.items(), known, strict=True):
        try:
            print(f"{name} {'was built already' if before else 'built'}: {done.result()}")
        except BuildError as error:
            errors[str(error)] = None
    for line in filter(None, (remark, f"{time.perf_counter() - start:.1f} s")):
        print(line)
    if errors:
        first, *others = errors
        raise BuildError(first + (f"\n{len(others)} more could not be built" if others else ""))
