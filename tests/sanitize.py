"""AddressSanitizer and UndefinedBehaviorSanitizer over every CPU kernel of ours: `python -m tests.sanitize`.

The kernels are compiled by the same code as ever; the compiler is a script that adds the sanitizers' flags, so that
what it makes has a key of its own in the cache. The process that loads them starts with the sanitizers' library. torch
itself is not instrumented, but its allocator is the sanitizer's: a load beside a tensor is seen. `--planted` compiles
kernels with a bug each instead, which must be reported. tests/cuda/sanitize.py is the same for CUDA.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxopt.kernels.cache import cache_dir

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"


@dataclass(frozen=True)
class Mutant:
    """A bug: what a file of fxopt/kernels says, what it says instead, and what must notice."""

    file: str
    old: str
    new: str
    words: tuple[str, ...]


HOSTILE = ("-m", "tests.kernels.hostile", "--small")
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
MUTANTS = (
    Mutant(
        "k_largest/select.h",
        "i < job.n; i++) {\n      Ints",
        "i <= job.n; i++) {\n      Ints",
        (*HOSTILE, "--share", "50", "-k", "k_largest"),
    ),
)


@dataclass(frozen=True)
class Told:
    """What a run ended with. clean: it passed, and nothing was reported."""

    clean: bool
    reported: bool
    seconds: float
    text: str


def run(words: Sequence[str], root: Path = ROOT) -> Told:
    """Runs Python on `words` in a tree, whose kernels are compiled with sanitizers on first use."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as reports:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            env={**os.environ, **_environment(root, reports)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        reported = "".join(path.read_text(errors="replace") for path in sorted(Path(reports).iterdir()))
    clean = done.returncode == 0 and not reported
    return Told(clean, bool(reported), time.perf_counter() - start, done.stdout + reported)


def _environment(root: Path, reports: str) -> dict[str, str]:
    compiler = os.environ.get("CXX", "g++")
    log = f"log_path={reports}/report"
    return {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "CXX": str(_sanitizing(compiler)),
        "LD_PRELOAD": ":".join(libraries(compiler)),
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",  # Python keeps what it has until its process ends
        "UBSAN_OPTIONS": f"print_stacktrace=1:{log}",
    }


def libraries(compiler: str) -> list[str]:
    """The sanitizers', and the C++ library, whose exceptions they have to know before torch loads it. Empty: none."""
    if shutil.which(compiler) is None:
        return []
    asked = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in asked]
    return found if all(map(os.path.isabs, found)) else []


def _sanitizing(compiler: str) -> Path:
    """The compiler as a script that adds the flags; the cache knows it, as every compiler, by its file."""
    text = f'#!/bin/sh\nunset LD_PRELOAD\nexec {compiler} "$@" {FLAGS}\n'
    path = cache_dir() / "sanitizing-g++"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, path)
    return path


def planted(mutant: Mutant) -> Told:
    """What is told of the mutant, in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fxopt", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = Path(folder) / "fxopt/kernels" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} no longer holds what the mutant replaces"
        path.write_text(text.replace(mutant.old, mutant.new))
        return run(mutant.words, Path(folder))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--graphs", type=int, default=5000, help="random graphs of tests/fuzz, of each kind; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--only-graphs", action="store_true", help="not the kernels' tests")
    parser.add_argument("--planted", action="store_true", help="kernels with a bug each, which must be reported")
    args = parser.parse_args(argv)
    if not libraries(os.environ.get("CXX", "g++")):
        print("python -m tests.sanitize: the compiler has no sanitizers here", file=sys.stderr)
        return 2
    build = ("-m", "fxopt", "build")
    tests = [build, HOSTILE, (*_PYTEST, "tests/kernels"), (*_PYTEST, "tests/properties")]
    graphs = (
        "-m",
        "tests.fuzz",
        "--graphs",
        str(args.graphs),
        "--minutes",
        "600",
        "--seed",
        str(args.seed),
        "--processes",
        str(os.cpu_count()),
        "--no-shrink",
    )
    calls = [*([build] if args.only_graphs else tests), *([graphs] if args.graphs else [])]
    wrong = 0
    for told, right, name in (
        [(told := planted(mutant), told.reported, mutant.file) for mutant in MUTANTS]
        if args.planted
        else [(told := run(words), told.clean, " ".join(words)) for words in calls]
    ):
        wrong += not right
        print(f"{'ok' if right else 'WRONG'}  {name}  {told.seconds:.0f} s")
        if not right:
            print(told.text[-6000:])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
