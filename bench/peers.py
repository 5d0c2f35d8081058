"""The compilers fxopt is measured against, each ready to be called or left out with a reason.

Compiling runs in a process of its own under a time limit, and leaves its result on disk (Inductor's cache, an
AOTInductor package); loading that here is quick. So a compiler that takes minutes cannot hold up a benchmark.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bench.models import E, F, ManyColumns, Mix, make_inputs

MIXES = {"e": E, "f": F}
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Subject:
    """A benchmark's model, as data: another process can build it too. part: "whole" or "columns"."""

    model: str
    columns: int
    part: str = "whole"
    packed: bool = False

    @property
    def mix(self) -> Mix:
        return MIXES[self.model].scaled(self.columns)

    def inputs(self, batch: int) -> tuple:
        return make_inputs(self.mix, batch, self.packed)

    def of(self, model: ManyColumns) -> nn.Module:
        return model.columns if self.part == "columns" else model


@dataclass(frozen=True)
class Ready:
    """A contender, and the seconds it took to make. `batches`: the ones it can run (None: all)."""

    call: Callable[..., Any]
    seconds: float
    batches: tuple[int, ...] | None = None

    def runs(self, batch: int) -> bool:
        return self.batches is None or batch in self.batches


@dataclass(frozen=True)
class Skipped:
    reason: str


def with_fxopt(module: nn.Module, args: tuple, lower: str = "fx") -> Ready | Skipped:
    """Seconds with the kernel library already built and loaded; `first_build` has the rest."""
    try:
        from fxopt.config import Config
        from fxopt.optimize import optimize
    except ImportError as error:
        return Skipped(f"fxopt cannot be imported: {error}")
    with torch.no_grad():
        optimize(_TwoColumns(), (torch.zeros(2, 2, dtype=torch.int64),))
        start = time.perf_counter()
        optimized = optimize(module, args, Config(lower=lower))
    return Ready(optimized, time.perf_counter() - start)


class _TwoColumns(nn.Module):
    """The smallest model that needs the kernel library."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(3, 4) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)


def first_build(limit: float) -> float | Skipped:
    """Seconds that `python -m fxopt build` takes longer with an empty cache than with a full one."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="fxopt-bench-cache-") as cache:
        for _ in range(2):
            start = time.perf_counter()
            done = _run([sys.executable, "-m", "fxopt", "build"], limit, {"FXOPT_CACHE": cache})
            if isinstance(done, Skipped):
                return done
            seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def with_compile(module: nn.Module, subject: Subject, batches: tuple[int, ...], limit: float) -> Ready | Skipped:
    """torch.compile as a user calls it: automatic dynamic shapes, one compile each for the first and second batch."""
    cache = scratch()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    seconds = _elsewhere("compile", subject, batches, limit, cache)
    if isinstance(seconds, Skipped):
        return seconds
    return Ready(_compile(module, subject, batches), seconds, batches)


def with_aoti(subject: Subject, batch: int, limit: float) -> dict[str, Ready | Skipped]:
    """The C++ package, called as a Python user would, and its runner alone (no pytree, the tensors already flat)."""
    package = Path(scratch()) / "model.pt2"
    seconds = _elsewhere("aoti", subject, (batch,), limit, str(package))
    if isinstance(seconds, Skipped):
        return {"aoti": seconds, "aoti runner": seconds}
    loaded = torch._inductor.aoti_load_package(str(package))
    flat = [x for x in tree_leaves(subject.inputs(batch)) if isinstance(x, torch.Tensor)]

    def runner(*_: Any) -> Any:
        return loaded.loader.boxed_run(list(flat))[0]  # it empties the list

    return {"aoti": Ready(loaded, seconds, (batch,)), "aoti runner": Ready(runner, seconds, (batch,))}


def scratch() -> str:
    """A folder until this process ends: a package holds all tables."""
    folder = tempfile.mkdtemp(prefix="fxopt-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(module: nn.Module, subject: Subject, batches: tuple[int, ...]) -> Callable[..., Any]:
    compiled = torch.compile(module)
    with torch.no_grad():
        for batch in batches:
            compiled(*subject.inputs(batch))
    return compiled


def _package(module: nn.Module, subject: Subject, batch: int, to: str) -> None:
    with torch.no_grad():
        program = torch.export.export(module, subject.inputs(batch), strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=to)


def _elsewhere(how: str, subject: Subject, batches: tuple[int, ...], limit: float, to: str) -> float | Skipped:
    """Seconds of compiling in another process, without its start, or why there is no result."""
    order = (how, asdict(subject), batches, to, torch.get_num_threads())
    done = _run([sys.executable, "-c", f"from bench import peers; peers._work(*{order!r})"], limit)
    return done if isinstance(done, Skipped) else float(done.splitlines()[-1])


def _run(command: list[str], limit: float, environment: dict[str, str] | None = None) -> str | Skipped:
    """What the command prints, or why it does not."""
    environment = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return Skipped(f"not done after {limit:.0f} s")
    if done.returncode:
        return Skipped((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return done.stdout


def _work(how: str, subject: dict[str, Any], batches: tuple[int, ...], to: str, threads: int) -> None:
    torch.set_num_threads(threads)  # generated code has it built in
    it = Subject(**subject)
    module = it.of(ManyColumns(it.mix))
    start = time.perf_counter()
    if how == "aoti":
        _package(module, it, batches[0], to)
    else:
        _compile(module, it, batches)
    print(time.perf_counter() - start)
