"""What fxopt needs of a machine, checked one by one, with what to do about each problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fxopt.kernels import build, cache, cache_entries, cuda_build
from fxopt.kernels.libraries import CUDA_LIBRARIES, LIBRARIES
from fxopt.machine import processor
from fxopt.report.units import count, seconds, size
from fxopt.runtime.native import LIBRARY

_OLDEST, _NEWEST = (2, 11), (2, 13)  # versions of torch that the tests run on
_BEHIND = 5  # torchrec 1.8 is made for torch 2.13
_LARGE = 1 << 30  # bytes of a cache that is worth cleaning
_OLD = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    state: "advice" costs speed, "problem" breaks something; todo: what to do about it ("" where it is fine).
    """

    name: str
    state: Literal["ok", "advice", "problem"]
    found: str
    todo: str = ""


def checks() -> list[Check]:
    """Everything, from the packages to the threads. Nothing is compiled or changed."""
    return [
        *_packages(),
        _instructions(),
        _compiler(),
        _kernels(),
        *_cuda(),
        _cache(),
        *_threads(),
        _load(),
    ]


def _packages() -> Iterator[Check]:
    torch_version = _version(torch.__version__)
    said = f"{torch.__version__} on Python {platform.python_version()}"
    if _OLDEST <= torch_version <= _NEWEST:
        yield Check("torch", "ok", said)
    else:
        known = f"{'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
        state: Literal["advice", "problem"] = "problem" if torch_version < _OLDEST else "advice"
        yield Check("torch", state, said, f"fxopt is tested with torch {known}: install one of these")
    torchrec, fbgemm = _installed("torchrec"), _installed("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm_gpu-cpu")
    if torchrec is None:
        yield Check("torchrec", "ok", "not installed; only models that use it need it")
        return
    yield _torchrec(torchrec, fbgemm, torch_version)


def _torchrec(torchrec: str, fbgemm: str | None, torch_version: tuple[int, int]) -> Check:
    said = f"{torchrec}, fbgemm {fbgemm or 'is missing'}"
    wanted = (torch_version[0] - 1, torch_version[1] - _BEHIND)
    fits = f"pip install torchrec=={wanted[0]}.{wanted[1]}.* and fbgemm-gpu of the same version, for this torch"
    if fbgemm is None:
        return Check("torchrec", "problem", said, f"torchrec needs fbgemm: {fits}")
    if _version(torchrec) != _version(fbgemm) or _version(torchrec) != wanted:
        return Check("torchrec", "advice", said, f"these versions were not made for each other: {fits}")
    return Check("torchrec", "ok", said)


def _instructions() -> Check:
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16|fma)\b", _text(Path("/proc/cpuinfo"))))
    best = "AVX-512" if "avx512f" in flags else "AVX2" if {"avx2", "fma"} <= flags else ""
    said = f"{processor()}: {', '.join(sorted(flags)) or 'no AVX2'}"
    if best:
        return Check("processor", "ok", f"{said}; the kernels use {best}")
    return Check(
        "processor", "advice", said, "the kernels run as plain C++: a processor with AVX2 is several times faster"
    )


def _compiler() -> Check:
    path = build.compiler_path()
    if path is None:
        if _kernels().state == "ok":
            return Check("compiler", "ok", f"{build.compiler_name()!r} is not on PATH, and every kernel is built")
        todo = "install g++ or set CXX; until then PyTorch runs in place of the kernels, which is slower"
        return Check("compiler", "problem", f"{build.compiler_name()!r} is not on PATH", todo)
    return Check("compiler", "ok", f"{path}: {_first_line([path, '--version'])}")


def _kernels() -> Check:
    every = (*LIBRARIES, LIBRARY)
    try:
        built = sum(build.find(library) is not None for library in every)
    except cache.BuildError as error:  # a library that somebody else may have written
        return Check("kernels", "problem", str(error), "python -m fxopt cache --clean, or set FXOPT_CACHE")
    said = f"{built} of {count(len(every), 'library', 'libraries')} built"
    if built == len(every):
        return Check("kernels", "ok", said)
    return Check("kernels", "advice", said, "python -m fxopt build compiles them now, and not at a first call")


def _cuda() -> Iterator[Check]:
    if torch.version.cuda is None:
        yield Check("CUDA", "ok", "this torch is for the CPU alone")
        return
    if not torch.cuda.is_available():
        todo = "no GPU or no driver: nvidia-smi tells which; a driver may be older than this torch needs"
        yield Check("CUDA", "advice", f"torch is made for CUDA {torch.version.cuda} and finds no GPU", todo)
        return
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown"
    yield Check("CUDA", "ok", f"{torch.version.cuda}, driver {driver}: {', '.join(dict.fromkeys(names))}")
    nvcc = cuda_build.nvcc()
    if nvcc is None:
        todo = f"{cuda_build.NO_COMPILER}; until then PyTorch runs in place of the CUDA kernels"
        yield Check("nvcc", "problem", "not found", todo)
        return
    archs = {cuda_build.arch_on(device) for device in range(torch.cuda.device_count())}
    here = [(library, arch) for library in CUDA_LIBRARIES for arch in archs if cuda_build.serves(arch)]
    built = sum(cuda_build.find(library, arch) is not None for library, arch in here)
    said = f"{nvcc}; {built} of {count(len(here), 'library', 'libraries')} built"
    todo = "" if built == len(here) else "python -m fxopt build compiles them now, and not at a first call"
    yield Check("nvcc", "advice" if todo else "ok", said, todo)


def _cache() -> Check:
    found, folder = cache_entries.entries(), cache.cache_dir()
    total = sum(each.bytes for each in found)
    age = (
        f", the oldest from {seconds(found[0].age) if found[0].age < 60 else _days(found[0].age)} ago" if found else ""
    )
    said = f"{folder}: {count(len(found), 'entry', 'entries')}, {size(total)}{age}"
    if not cache_entries.writable():
        return Check("cache", "problem", said, "it cannot be written: set FXOPT_CACHE to a folder that can")
    if total > _LARGE or (found and found[0].age > _OLD):
        return Check("cache", "ok", said, "python -m fxopt cache --clean removes what is there")
    return Check("cache", "ok", said)


def _threads() -> Iterator[Check]:
    threads, cores = torch.get_num_threads(), _cores()
    settings = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    said = f"{count(threads, 'thread')} on {count(cores, 'core')}{''.join(f', {each}' for each in settings)}"
    if threads > cores:
        todo = f"threads wait for one another: set OMP_NUM_THREADS={cores}, or torch.set_num_threads({cores})"
        yield Check("threads", "advice", said, todo)
    elif threads < cores:
        todo = f"large batches could use more: OMP_NUM_THREADS={cores}, unless other processes have the other cores"
        yield Check("threads", "advice", said, todo)
    else:
        yield Check("threads", "ok", said)
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        todo = "threads sleep between operators, and waking them takes longer than a small one: unset OMP_WAIT_POLICY"
        yield Check("OpenMP", "advice", "OMP_WAIT_POLICY=passive", todo)


def _load() -> Check:
    load, cores = os.getloadavg()[0], _cores()
    said = f"{load:.1f} processes want {count(cores, 'core')}"
    return Check("load", "ok", said, "measure when the machine is idle" if load > cores + 0.5 else "")


def _cores() -> int:
    """What this process may use: its affinity, and the limit of its control group."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).strip().partition(" ")
    limit = int(quota) // int(period) if quota.isdigit() and period.isdigit() else affinity
    return max(1, min(affinity, limit))


def _version(text: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]), int(numbers[1])


def _installed(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _first_line(command: list[str]) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told[0].strip() if told else ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _days(age: float) -> str:
    return count(int(age // 86400), "day") if age >= 86400 else f"{age / 3600:.1f} hours"
